"""Traces: a run, its phases and batches as spans, taken by a real receiver; without one a run is what it was."""

from __future__ import annotations

import datetime
import functools
import http.server
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import POLICIES, PROGRAM, PROMPTLY, Database, Program, Result, configuration, log

#: An interpreter that has OpenTelemetry: Debian 12 has no package of it.
ENVIRONMENT = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / (
    "session-retention-tests/environment/bin/python"
)
#: How long a run waits for the receiver at its end; and two seconds for a loaded machine and a log in whole seconds.
PATIENCE = 5.0 + 2.0

#: Makes one JSON line of each request, which are on its input, each behind its length.
DECODE = """
import sys
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
while size := sys.stdin.buffer.read(4):
    request = ExportTraceServiceRequest.FromString(sys.stdin.buffer.read(int.from_bytes(size, "big")))
    print(MessageToJson(request, indent=None))
"""


@functools.cache
def python() -> str:
    for candidate in (sys.executable, str(ENVIRONMENT)):
        found = [candidate, "-c", "import opentelemetry.sdk, opentelemetry.exporter.otlp.proto.http, psycopg, tomli_w"]
        if os.path.exists(candidate) and subprocess.run(found, capture_output=True, check=False).returncode == 0:
            return candidate
    if os.environ.get("RETENTION_REQUIRE_SERVERS"):
        pytest.fail(f"{ENVIRONMENT} has no OpenTelemetry; tests/run installs it")
    pytest.skip("no Python here has OpenTelemetry")


class Traced(Program):
    """The program under that interpreter."""

    options: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        return [python(), *self.options, str(PROGRAM), "--config", str(self.path), *arguments]


class Receiver:
    """Takes OTLP over HTTP, or does not: it answers with `status`, and never if that is 0."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        receiver, self.over = self, threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not receiver.status:
                    receiver.over.wait()
                    return
                receiver.bodies.append(body)
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}"}

    def spans(self) -> list[dict[str, Any]]:
        """The spans that came, in the order in which they began, with their attributes as a dictionary."""
        framed = b"".join(len(body).to_bytes(4, "big") + body for body in self.bodies)
        decoded = subprocess.run([python(), "-c", DECODE], input=framed, capture_output=True, check=True).stdout
        found = []
        for request in map(json.loads, decoded.splitlines()):
            for resource in request["resourceSpans"]:
                assert attributes(resource["resource"])["service.name"] == "session-retention"
                for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                    found.append({**span, "attributes": attributes(span)})  # noqa: PERF401, three levels deep
        return sorted(found, key=lambda span: int(span["startTimeUnixNano"]))

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def attributes(item: dict[str, Any]) -> dict[str, Any]:
    values = {pair["key"]: pair["value"] for pair in item["attributes"]}
    return {key: int(v["intValue"]) if "intValue" in v else v.get("stringValue") for key, v in values.items()}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def traced(tmp_path: pathlib.Path) -> Iterator[Callable[[], Traced]]:
    """The program, in a directory of its own each time."""
    made: list[Traced] = []

    def make() -> Traced:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Traced(directory))
        return made[-1]

    yield make
    for program in made:
        program.kill()


def fill(database: Database, rows: int) -> None:
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        f" SELECT '+7 xyzzy', now() - interval '40 days' FROM generate_series(1, {rows})"
    )


TWO = {name: POLICIES[name] for name in ("sicr", "tokens_expired")}


def test_a_run_is_a_tree_of_spans(systems: Database, traced: Callable[[], Traced], receiver: Receiver) -> None:
    """One trace: the run with its identifier under both names, below it the phases, below these their batches."""
    fill(systems, 25)
    config = configuration(systems.conninfo, TWO, batch_size=10)
    result = traced()(config, "--once", "--json", env=receiver.environment)
    assert result.returncode == 0, result.output
    spans = receiver.spans()
    run = result.json["job_run_id"]
    assert [span["name"] for span in spans] == ["run", "phase", "batch", "batch", "batch", "phase"]
    assert len({span["traceId"] for span in spans}) == 1
    root, first, *batches, second = spans
    assert (root.get("parentSpanId"), root["attributes"]["jobRunId"], root["attributes"]["correlationId"]) == (
        *(None, run, run),
    )
    assert {span["parentSpanId"] for span in (first, second)} == {root["spanId"]}
    assert {span["parentSpanId"] for span in batches} == {first["spanId"]}
    assert [(span["attributes"]["phase"], span["attributes"]["deletedCount"]) for span in (first, second)] == [
        *(("sicr", 25), ("tokens_expired", 0)),
    ]
    assert [span["attributes"] for span in batches] == [
        {"phase": "sicr", "batchSize": 10, "deletedCount": count} for count in (10, 10, 5)
    ]
    for inner, outer in [(first, root), (second, root), *((batch, first) for batch in batches)]:
        assert int(outer["startTimeUnixNano"]) <= int(inner["startTimeUnixNano"])
        assert int(inner["endTimeUnixNano"]) <= int(outer["endTimeUnixNano"])
    assert not any(span["status"] for span in spans)


def test_a_failure_is_an_error_without_row_values(
    systems: Database, traced: Callable[[], Traced], receiver: Receiver
) -> None:
    """The phase and the run are marked, the other phase is not; a trigger that tells what is in a row tells nobody."""
    fill(systems, 2)
    systems.execute(
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'the number is %', OLD.phone_number USING DETAIL = 'xyzzy', ERRCODE = 'P0001'; END $$;"
        "CREATE TRIGGER tell BEFORE DELETE ON identity.sign_in_confirmation_requests"
        "    FOR EACH ROW EXECUTE FUNCTION tell()"
    )
    result = traced()(configuration(systems.conninfo, TWO), "--once", "--json", env=receiver.environment)
    assert result.returncode == 1, result.output
    run, *phases = (span for span in receiver.spans() if span["name"] != "batch")
    failed = {span["attributes"].get("phase"): span["status"].get("code") for span in (run, *phases)}
    assert failed == {None: "STATUS_CODE_ERROR", "sicr": "STATUS_CODE_ERROR", "tokens_expired": None}
    assert phases[0]["status"]["message"] == result.policies["sicr"]["error"]["message"]
    assert phases[0]["attributes"]["sqlstate"] == "P0001"
    assert b"xyzzy" not in b"".join(receiver.bodies)


def test_a_run_without_a_database_is_a_span_with_an_error(traced: Callable[[], Traced], receiver: Receiver) -> None:
    """There are no phases; why there is no run is said as the log says it."""
    result = traced()(configuration("host=/nonexistent password=xyzzy"), "--once", env=receiver.environment)
    assert result.returncode == 69, result.output
    (span,) = receiver.spans()
    assert (span["name"], span["status"]["code"]) == ("run", "STATUS_CODE_ERROR")
    assert span["status"]["message"] == log(result.stdout)[-1].fields["error"]
    assert b"xyzzy" not in b"".join(receiver.bodies)


def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def test_an_endpoint_that_takes_nothing_changes_nothing(
    systems: Database, traced: Callable[[], Traced], receiver: Receiver
) -> None:
    """Refusing, hanging, failing, or settings that are nonsense: the same result, and one line says so.

    It comes seconds later at most.
    """
    failing = Receiver()
    failing.status, receiver.status = 500, 0
    environments = {
        "refuses": {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:xyzzy@127.0.0.1:{closed_port()}"},
        "fails": failing.environment,
        "nonsense": {**receiver.environment, "OTEL_BSP_MAX_QUEUE_SIZE": "-1", "OTEL_EXPORTER_OTLP_TIMEOUT": "xyzzy"},
        "hangs": receiver.environment,
    }
    config = configuration(systems.conninfo, TWO)
    running = {
        why: traced().start(config, "--once", "--json", env=environment) for why, environment in environments.items()
    }
    results = {why: Program.finish(process) for why, process in running.items()}
    failing.close()
    for why, result in results.items():
        assert result.returncode == 0, (why, result.output)
        assert {policy["stop_reason"] for policy in result.policies.values()} == {"drained"}
        lines = log(result.stderr)
        assert [line.message for line in lines if line.event == "record_failed"] == ["traces not sent"], (why, lines)
        assert "xyzzy" not in result.output, why
        completed, last = (datetime.datetime.fromisoformat(line.time) for line in lines[-2:])
        assert (last - completed).total_seconds() < PATIENCE, why


def stopped(process: subprocess.Popen[str]) -> Result:
    """Send SIGTERM, and see that the process ends as soon as is promised."""
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    result = Program.finish(process)
    assert time.monotonic() - sent < PROMPTLY
    return result


def test_a_signal_ends_a_run_whose_endpoint_hangs(
    systems: Database, traced: Callable[[], Traced], receiver: Receiver
) -> None:
    """The few seconds after SIGTERM are for the batch in flight; what is left of them is for traces."""
    receiver.status = 0
    fill(systems, 1000)
    config = configuration(systems.conninfo, TWO, batch_size=1, pause="100ms")
    process = traced().start(config, "--once", env=receiver.environment)
    assert process.stdout
    assert any(" batch deleted " in line for line in process.stdout)
    result = stopped(process)
    assert result.returncode == 0, result.output
    assert [line.event for line in log(result.stdout)][-2:] == ["job_completed", "record_failed"]


def test_a_signal_while_traces_are_sent_changes_no_result(
    systems: Database, traced: Callable[[], Traced], receiver: Receiver
) -> None:
    """The run has ended well, and the endpoint hangs: SIGTERM then ends the waiting, not the result."""
    receiver.status = 0
    process = traced().start(configuration(systems.conninfo, TWO), "--once", "--json", env=receiver.environment)
    assert process.stderr
    assert any(" job completed " in line for line in process.stderr)
    result = stopped(process)
    assert (result.returncode, result.json["stop_reason"]) == (0, "drained")


def test_without_the_packages_nothing_is_said(
    systems: Database, program: Program, receiver: Receiver, tmp_path: pathlib.Path
) -> None:
    """An endpoint is set for every program of the machine, say, and OpenTelemetry is not installed."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "opentelemetry.py").touch()  # there is nothing in it to import
    environment = {**receiver.environment, "PYTHONPATH": str(shadow)}
    result = program(configuration(systems.conninfo, TWO), "--once", env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "record_failed" not in {line.event for line in log(result.stdout)}
    assert receiver.bodies == []


@pytest.mark.parametrize(
    "environment",
    [{}, {"OTEL_SDK_DISABLED": "True"}, {"OTEL_TRACES_EXPORTER": "none"}],
    ids=lambda environment: next(iter(environment), "no endpoint"),
)
def test_what_is_not_wanted_is_not_imported(
    traced: Callable[[], Traced], receiver: Receiver, environment: dict[str, str]
) -> None:
    """Where OpenTelemetry is installed, a run without an endpoint, or that is told not to, does not even load it."""
    program = traced()
    program.options = ("-X", "importtime")
    wanted = {**receiver.environment, **environment} if environment else {}
    result: Result = program(configuration("host=/nonexistent"), "--once", env=wanted)
    assert result.returncode == 69, result.output
    assert "psycopg" in result.stderr
    assert "opentelemetry" not in result.stderr
    assert receiver.bodies == []
