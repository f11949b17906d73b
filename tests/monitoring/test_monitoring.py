"""What operators see: Debian's node_exporter and Prometheus, our alert rules and our dashboard, and the job itself."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from lab import TOP, Database, Program, configuration, until

RULES = TOP / "packaging" / "prometheus" / "session-retention.rules.yml"
DASHBOARD = json.loads((TOP / "packaging" / "grafana" / "session-retention.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TMPFILES = TOP / "packaging" / "systemd" / "session-retention.tmpfiles"
#: Where the package looks for node_exporter, and where Debian's node_exporter looks by itself.
COLLECTOR = "/var/lib/prometheus/node-exporter"
INSTALLED = "/var/lib/session-retention"
PREFIX = "identity_session_retention_"

#: How long a day is in the accelerated scenario: the job's interval, and what every duration in the rules is scaled to.
DAY = 2.0
SCRAPE = "250ms"

DURATION = re.compile(r"\b(?:\d+(?:ms|[smhdwy]))+\b")
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}


def accelerated(text: str) -> str:
    """Rules or a query in which every duration (`for: 30m`, `[15d:6h]`, `offset 1h30m`) is that part of a short day.

    Whole milliseconds, for Prometheus knows nothing less. Comparisons with the job's interval need no change: they
    take it from the job's metrics.
    """

    def shorter(duration: re.Match[str]) -> str:
        seconds = sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration[0]))
        return f"{max(round(seconds / 86400 * DAY * 1000), 1)}ms"

    return DURATION.sub(shorter, text)


def promtool(*arguments: str | pathlib.Path) -> None:
    result = subprocess.run(["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def get(address: str, path: str, **query: str) -> str:
    url = f"http://{address}{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


class Host:
    """A machine as the package leaves it: node_exporter with its own collector directory, and in that our link.

    Both run as Debian's user `prometheus`. The exporter sees `collector` where its package has that directory: it has
    a mount namespace to itself.
    """

    def __init__(self) -> None:
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-prometheus-"))
        self.directory.chmod(0o755)
        self.metrics = self.directory / "job" / "metrics.prom"
        self.collector = self.directory / "collector"
        self.collector.mkdir()
        self.link = self.collector / "session-retention.prom"
        self.address = free_address()
        self.processes: list[subprocess.Popen[bytes]] = []

    def export(self) -> None:
        mount = f'mount --bind "{self.collector}" {COLLECTOR} && exec "$@"'
        # of all collectors ours alone: what the others find on this machine is not our business
        arguments = ["--collector.disable-defaults", "--collector.textfile", f"--web.listen-address={self.address}"]
        self.start(
            ["prometheus-node-exporter", *arguments], self.address, "unshare", "--mount", "sh", "-c", mount, "sh"
        )

    def start(self, command: list[str], address: str, *prefix: str) -> None:
        user = ["setpriv", "--reuid=prometheus", "--regid=prometheus", "--init-groups"]
        log = self.directory / f"{command[0]}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen([*prefix, *user, *command], stdout=stream, stderr=stream, cwd="/")
        self.processes.append(process)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return bool(get(address, "/metrics" if "exporter" in command[0] else "/-/ready"))
            except OSError:
                return False

        until(answers, f"{command[0]} answers")

    def install(self) -> None:
        """Make the job's directory and its first metrics as the package's tmpfiles do."""
        text = TMPFILES.read_text().replace(INSTALLED, str(self.metrics.parent))
        ours = self.directory / "session-retention.conf"
        ours.write_text(text.replace("session-retention session-retention", "- -"))
        subprocess.run(["systemd-tmpfiles", "--create", ours], check=True)

    def exported(self) -> dict[str, float]:
        """What the exporter serves of the job, and whether it could read all files."""
        lines = get(self.address, "/metrics").splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            name: float(value)
            for name, value in samples.items()
            if name.startswith((PREFIX, "node_textfile_scrape_error"))
        }

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(30)
        shutil.rmtree(self.directory)


class Prometheus:
    """Debian's Prometheus, which scrapes the host every few moments and has our rules, accelerated."""

    def __init__(self, host: Host) -> None:
        self.address = free_address()
        data = host.directory / "prometheus"
        data.mkdir()
        shutil.chown(data, "prometheus", "prometheus")
        (host.directory / "rules.yml").write_text(accelerated(RULES.read_text()))
        config = host.directory / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: {SCRAPE}, scrape_timeout: {SCRAPE}, evaluation_interval: {SCRAPE}}}\n"
            "rule_files: [rules.yml]\n"
            f"scrape_configs: [{{job_name: node, static_configs: [{{targets: ['{host.address}']}}]}}]\n"
        )
        options = [
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            f"--web.listen-address={self.address}",
            "--query.lookback-delta=1s",  # of five minutes, what is left is less than a scrape
        ]
        host.start(["prometheus", *options], self.address)

    def api(self, path: str, **query: str) -> Any:
        return json.loads(get(self.address, f"/api/v1/{path}", **query))["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        found = self.api("query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def firing(self) -> set[tuple[str, str]]:
        """Name and policy of each alert that fires now, its texts filled in."""
        alerts = [alert for alert in self.api("alerts")["alerts"] if alert["state"] == "firing"]
        for alert in alerts:
            text = "".join(alert["annotations"].values())
            assert not re.search("<no value>|error expanding", text), text
        return {short(alert["labels"]) for alert in alerts}

    def fired(self) -> set[tuple[str, str]]:
        """Each alert that ever fired."""
        return {short(labels) for labels, _ in self.query('last_over_time(ALERTS{alertstate="firing"}[1h])')}

    def until_firing(self, *expected: tuple[str, str]) -> None:
        """Wait until these alerts fire, and no others."""
        seen: list[set[tuple[str, str]]] = []

        def as_expected() -> bool:
            seen.append(self.firing())
            return seen[-1] == set(expected)

        try:
            until(as_expected, "the alerts fire")
        except AssertionError as error:
            raise AssertionError(f"expected {set(expected)}, last seen {seen[-1]}") from error


def short(labels: dict[str, str]) -> tuple[str, str]:
    return labels["alertname"].removeprefix("SessionRetention"), labels.get("policy", "")


@pytest.fixture
def host() -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("only root can become the user prometheus and mount")
    host = Host()
    try:
        host.export()
        yield host
    finally:
        host.close()


def look_at_the_dashboard(prometheus: Prometheus) -> None:
    """Every query has an answer: there is something to see of everything, while rows are left behind."""
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "2d")
            expression = accelerated(expression)
            assert prometheus.query(expression), f"{panel['title']}: no data from {expression}"


def test_the_rules_do_in_slow_motion_what_they_say() -> None:
    """Each alert fires when it should and not before, ends, and says what to do: days and weeks, simulated."""
    promtool("check", "rules", RULES)
    promtool("test", "rules", "session-retention.test.yml")


def test_the_package_installs_the_rules_and_not_their_tests() -> None:
    """The package takes what is named *.rules.yml."""
    assert [path.name for path in RULES.parent.glob("*.rules.yml")] == [RULES.name]


def test_node_exporter_serves_the_metrics_before_the_first_run_as_well(
    host: Host, systems: Database, program: Program
) -> None:
    """Debian's exporter, as its own user, from its own directory; from the moment the package is installed."""
    host.install()
    host.link.symlink_to(host.metrics)
    assert host.exported() == {"node_textfile_scrape_error": 0, f"{PREFIX}interval_seconds": 86400}
    result = program.once(configuration(systems.conninfo, metrics={"textfile": str(host.metrics)}))
    assert result.returncode == 0, result.output
    exported = host.exported()
    assert exported["node_textfile_scrape_error"] == 0
    assert exported[f'{PREFIX}backlog{{policy="refresh",table="identity.refresh_sessions"}}'] == 0
    written = [line for line in host.metrics.read_text().splitlines() if line.startswith(PREFIX)]
    assert len(exported) == len(written) + 1


def test_the_alerts_fire_and_end_and_the_dashboard_shows_what_happened(
    host: Host, database: Database, program: Program
) -> None:
    """The job on a real database, with an interval of moments: never run, failing, falling behind, overdue, stopped,
    vanished. Blocked rows, in ever greater number and however old, are no reason for any alert. Each query of the
    dashboard has an answer."""
    prometheus = Prometheus(host)
    database.execute(
        """
        CREATE TABLE growing (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz);
        CREATE TABLE held (LIKE growing INCLUDING ALL);
        CREATE TABLE holds (session int REFERENCES held);
        CREATE INDEX ON holds (session);
        CREATE TABLE failing (LIKE growing INCLUDING ALL);
        GRANT SELECT ON holds TO retention
        """
    )
    names = ("growing", "held", "failing")
    for table in names:
        database.grant(table, select="id, at")
    policies = {table: {"table": table, "age_column": "at", "retention": "1h"} for table in names}
    config = configuration(
        database.conninfo,
        policies,
        metrics={"textfile": str(host.metrics), "state": str(host.metrics.parent / "state.toml")},
        retention_interval=f"{round(DAY * 1000)}ms",
    )

    def run(expected: int, **changed: Any) -> None:
        """One run, seen by Prometheus."""
        result = program.inside({**config, **changed}, "--once", "--json")
        assert result.returncode == expected, result.output
        ended = re.search(rf"^{PREFIX}last_run_timestamp_seconds (.*)$", host.metrics.read_text(), re.MULTILINE)
        assert ended
        expression = f"{PREFIX}last_run_timestamp_seconds == {ended[1]}"
        until(lambda: prometheus.query(expression), "Prometheus has seen the run")

    # nothing there; installed; every run fails, the first failure among them that anybody sees
    prometheus.until_firing(("MetricsMissing", ""))
    host.install()
    host.link.symlink_to(host.metrics)
    prometheus.until_firing()

    def fail() -> bool:
        run(69, database={"conninfo": f"host={host.directory} dbname=none", "connect_retry": "0s"})
        return prometheus.firing() == {("Errors", ""), ("NeverSucceeded", "")}

    until(fail, "the alerts on a job that has never succeeded fire")
    run(0)
    prometheus.until_firing()

    # more to do each time than gets done: the old rows of one table are locked, those of another are held by a third
    locks = database.connect(autocommit=False)
    behind = {("BacklogGrowing", "growing"), ("RowsOverdue", "growing")}

    def fall_behind() -> bool:
        for table in ("growing", "held"):
            database.execute(f"INSERT INTO {table} (at) SELECT now() - interval '2 h' FROM generate_series(1, 10)")
        database.execute("INSERT INTO holds SELECT id FROM held EXCEPT SELECT session FROM holds")
        locks.execute("SELECT FROM growing FOR UPDATE")
        run(0)
        return prometheus.firing() == behind

    until(fall_behind, "the alerts on what is left behind fire")
    (_, growing), (_, held) = sorted(prometheus.query(f"{PREFIX}backlog > 0"), key=lambda sample: sample[0]["policy"])
    assert growing == held > 0
    look_at_the_dashboard(prometheus)
    locks.rollback()
    run(0)
    prometheus.until_firing()

    # a policy fails, and is mended
    database.execute("REVOKE DELETE ON failing FROM retention")
    run(1)
    prometheus.until_firing(("Errors", "failing"))
    database.execute("GRANT DELETE ON failing TO retention")
    run(0)
    prometheus.until_firing()

    # nobody runs it any more; a late run; the metrics vanish
    prometheus.until_firing(("Stopped", ""))
    run(0)
    prometheus.until_firing()
    host.link.unlink()
    prometheus.until_firing(("MetricsMissing", ""))

    once = {("MetricsMissing", ""), ("NeverSucceeded", ""), ("Errors", ""), ("Errors", "failing"), ("Stopped", "")}
    assert prometheus.fired() == once | behind
    rules = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {f"SessionRetention{name}" for name, _ in once | behind} == {
        rule["name"] for rule in rules if rule["type"] == "alerting"
    }
    assert prometheus.query("max_over_time(node_textfile_scrape_error[1h])")[0][1] == 0


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Unique ids, no panel on top of another or beyond the edge, every panel explained and with a unit, and whatever
    Prometheus it is opened with."""
    assert (DASHBOARD["uid"], DASHBOARD["schemaVersion"]) == ("session-retention", 42)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references, panel["title"]
        assert len(references) == len(set(references)), panel["title"]
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [
            source for _ in range(len(references) + 1)
        ]
        for target in panel["targets"]:
            selectors = len(re.findall(rf'{PREFIX}\w+{{|__name__=~"', target["expr"]))
            assert selectors == target["expr"].count('instance=~"$instance"') > 0, target["expr"]
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["instance"]["datasource"] == source
