"""Debian guests for the tests: a whole system with its own systemd, journald and PostgreSQL, booted in three seconds.

A guest is a container of systemd-nspawn. Its file system is made by mmdebstrap, from the mirrors that this machine's
apt uses, once a week, in ~/.cache/session-retention-tests; each guest writes to an overlay of its own, in memory, so
that it starts as the last one did. Its network is its loopback alone. It needs root, and ends with the process that
started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any

import pytest
import tomli_w
from lab import SYSTEMS, configuration, until

#: Debian 12 and 13.
SUITES = ("bookworm", "trixie")
#: Where what an installed job does is tested, beside its installation: on both for the patient.
RUNS_ON = SUITES if "RETENTION_SOAK_PACKAGE" in os.environ else SUITES[:1]

#: What a guest has beside Debian's minimum: an administrator's tools, a database server that can do TLS, and what
#: the program depends on, so that its package installs without a network.
PACKAGES = (
    *("dbus", "iproute2", "libnss-systemd", "procps", "sudo", "systemd", "systemd-sysv"),
    *("postgresql", "ssl-cert"),
    *("python3", "python3-prometheus-client", "python3-psycopg", "python3-systemd", "python3-tomli-w"),
)
#: Beside these, on one of them: the judge of packages of the release that this machine is not.
ALSO = {"bookworm": (), "trixie": ("lintian",)}

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "session-retention-tests"
#: How old a file system may be: Debian's updates arrive about as often.
STALE = 7 * 24 * 3600
#: Where the kernel has the group hierarchy that a guest can use: on some machines beside those of version 1.
CGROUPS = pathlib.Path("/sys/fs/cgroup")

#: The host's side of a guest: a group of its own, an overlay in memory, and the container, again after each reboot.
#: All mounts are private to it and go with its last process.
HOLDER = """
set -eu
group=$1 base=$2 work=$3; shift 3
echo $$ >"$group/cgroup.procs"
mount -t tmpfs -o mode=755 tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=$base,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
status=133
while [ $status -eq 133 ]; do
    status=0
    setpriv --pdeathsig TERM systemd-nspawn --directory="$work/root" "$@" || status=$?
done
"""


def mirrors(suite: str) -> list[str]:
    """The lines of sources.list for a suite, its updates and its security updates, from this machine's own mirrors."""
    columns = "$(ORIGIN)\t$(LABEL)\t$(REPO_URI)\t$(COMPONENT)"
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", columns, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        origin, label, address, component = line.split("\t")
        if origin == "Debian" and component == "main":
            found.setdefault(label, address)
    if "Debian" not in found:
        raise RuntimeError("apt knows no Debian mirror; run `apt-get update`")
    key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    lines = [f"deb {key} {found['Debian']} {name} main" for name in (suite, f"{suite}-updates")]
    if "Debian-Security" in found:
        lines.append(f"deb {key} {found['Debian-Security']} {suite}-security main")
    return lines


def build(suite: str, directory: pathlib.Path, packages: tuple[str, ...] = ()) -> None:
    """Make the file system of a guest."""
    hooks = [
        # nothing of this machine, and nothing that a first boot makes
        'echo guest >"$1/etc/hostname"; echo 127.0.0.1 localhost guest >"$1/etc/hosts"; : >"$1/etc/machine-id"',
        # a database server that starts quickly, and whose data nobody will miss
        'for conf in "$1"/etc/postgresql/*/main/conf.d; do printf "fsync = off\\n" >"$conf/test.conf"; done',
        'touch -r "$1/usr" "$1/etc/.updated" "$1/var/.updated"',
        # a journal that outlives a reboot
        'rm -rf "$1"/var/log/journal/* "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin',
    ]
    subprocess.run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--components=main",
            f"--include={','.join([*PACKAGES, *ALSO[suite], *packages])}",
            '--aptopt=Acquire::Languages "none"',
            "--dpkgopt=force-unsafe-io",
            *(f"--customize-hook={hook}" for hook in hooks),
            suite,
            str(directory),
            *mirrors(suite),
        ],
        check=True,
        env={**os.environ, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TMPDIR": tempfile.gettempdir()},
        stdin=subprocess.DEVNULL,
    )


@functools.cache
def base(suite: str, packages: tuple[str, ...] = ()) -> tuple[pathlib.Path, int]:
    """A file system that is neither missing nor stale, and a lock (a descriptor) that keeps it in place."""
    recipe = json.dumps([suite, PACKAGES, ALSO[suite], packages, inspect.getsource(build)])
    directory = CACHE / "guests" / f"{suite}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def fresh() -> bool:
        return directory.exists() and time.time() - directory.with_suffix(".lock").stat().st_mtime < STALE

    fcntl.flock(lock, fcntl.LOCK_SH)
    if not fresh():
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another process that builds it, and for guests that still use it
        if not fresh():
            part = directory.with_suffix(".part")
            remove(directory, part, *outdated(directory, suite))
            build(suite, part, packages)
            part.rename(directory)
            os.utime(lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
    return directory, lock


def outdated(directory: pathlib.Path, suite: str) -> list[pathlib.Path]:
    """File systems of older recipes that no guest uses."""
    found = []
    for other in directory.parent.glob(f"{suite}-*.lock"):
        if other.stem == directory.stem:
            continue
        with other.open("r+") as lock, contextlib.suppress(BlockingIOError):
            if time.time() - other.stat().st_mtime > STALE:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found += [other.with_suffix(""), other]
    return found


def remove(*paths: pathlib.Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def cgroups() -> pathlib.Path:
    """The root of the hierarchy of version 2, mounted where it is not."""

    def unified(path: pathlib.Path) -> bool:
        kind = subprocess.run(["stat", "-fc", "%T", path], capture_output=True, text=True, check=False).stdout
        return kind.strip() == "cgroup2fs"

    if unified(CGROUPS):
        return CGROUPS
    beside = CGROUPS / "unified"
    if not unified(beside):
        beside.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "cgroup2", "cgroup", beside], check=True)
    return beside


_numbers = itertools.count(1)


class Guest:
    """A booted guest. `stop()` it, or use it in a `with` statement."""

    def __init__(self, suite: str = "bookworm", packages: tuple[str, ...] = (), *, network: bool = False) -> None:
        """Boot it, and wait until its systemd says that it is up, with all its units, PostgreSQL among them.

        With `network` it shares that of this machine, ports and all.
        """
        if os.geteuid() != 0:
            pytest.skip("a guest needs root")
        self.suite = suite
        self.begin = 0
        self.name = f"session-retention-{os.getpid()}-{next(_numbers)}"
        directory, _ = base(suite, packages)
        self.group = cgroups() / self.name
        self.group.mkdir()
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="retention-guest-"))
        self.console = self.work.with_suffix(".log")
        with self.console.open("w") as console:
            self.process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation=private", "setpriv", "--pdeathsig", "KILL"),
                    *("sh", "-c", HOLDER, "sh", self.group, directory, self.work),
                    *(f"--machine={self.name}", "--boot", "--quiet"),
                    *(("--resolv-conf=copy-host",) if network else ("--private-network", "--resolv-conf=off")),
                    # nobody to register with, where PID 1 is not systemd
                    *("--register=no", "--keep-unit", "--link-journal=no"),
                    # or IPAddressDeny= would be accepted and ignored
                    *("--system-call-filter=bpf", "--capability=CAP_BPF,CAP_NET_ADMIN"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                start_new_session=True,
            )
        self.leader = 0
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_up(self) -> None:
        before, self.leader = self.leader, 0

        def up() -> int:
            assert self.process.poll() is None, f"the guest did not start:\n{self.console.read_text()[-3000:]}"
            for nspawn in children(self.process.pid):
                for child in children(nspawn):
                    if child != before and is_init(child):
                        return child
            return 0

        self.leader = until(up, "the guest's systemd")
        state = self._enter("systemctl", "is-system-running", "--wait", check=False).stdout.strip()
        if state != "running":
            failed = self._enter("systemctl", "--failed", "--no-pager", check=False).stdout
            raise RuntimeError(f"the guest is {state}:\n{failed}\n{self.console.read_text()[-3000:]}")

    def _enter(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.leader}", "--all", "--wd=/", *command]
        return subprocess.run(enter, **{"capture_output": True, "text": True, "timeout": 120, **options})

    def exec(
        self,
        *command: str,
        user: str = "",
        env: dict[str, str] | None = None,
        stdin: str = "",
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the guest, as a unit of its own there: no more of this machine's than the three streams."""
        unit = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"]
        unit += [f"--uid={user}"] if user else []
        unit += [f"--setenv={name}={value}" for name, value in (env or {}).items()]
        result = self._enter(*unit, "--", *command, input=stdin, timeout=timeout)
        if check and result.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def shell(self, script: str, **options: Any) -> str:
        """Run a script in the guest, which ends at its first failure, and return what it printed."""
        return self.exec("sh", "-euc", script, **options).stdout

    def sql(self, statement: str, dbname: str = "auth") -> str:
        """Run statements as the superuser of the guest's server, and return the values of their rows."""
        psql = ["psql", "--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--set=ON_ERROR_STOP=1"]
        return self.exec(*psql, f"--dbname={dbname}", user="postgres", stdin=statement).stdout.strip()

    @property
    def cluster(self) -> str:
        """The directory with the configuration of the guest's PostgreSQL."""
        (directory,) = self.root.glob("etc/postgresql/*/main")
        return f"/{directory.relative_to(self.root)}"

    @property
    def server(self) -> str:
        """The unit of the guest's PostgreSQL."""
        return f"postgresql@{self.cluster.split('/')[3]}-main.service"

    @property
    def root(self) -> pathlib.Path:
        """The guest's file system, seen from here. An absolute symbolic link leads into this machine's, though."""
        return pathlib.Path(f"/proc/{self.leader}/root")

    def systems(self, *, role: bool = True) -> None:
        """The database `auth` with the three systems, empty, and the role of the job, which has no password."""
        self.sql("CREATE DATABASE auth", "postgres")
        tables, _, grants = SYSTEMS.read_text().partition("GRANT ")
        self.sql(tables)
        if role:
            self.sql('CREATE ROLE "session-retention" LOGIN', "postgres")
            self.sql(f"GRANT {grants}".replace("TO retention", 'TO "session-retention"'))

    def fill(self, old: int = 100, young: int = 10) -> None:
        """Empty the three systems and give each so many rows that are to go, and so many that are to stay."""
        self.sql(f"""
            TRUNCATE identity.sign_in_confirmation_requests, identity.refresh_sessions, refresh_tokens;
            INSERT INTO identity.sign_in_confirmation_requests (phone_number, status, created_at)
            SELECT '+7', 'Confirmed', now() - CASE WHEN n > {old} THEN interval '1 day' ELSE interval '40 days' END
            FROM generate_series(1, {old + young}) AS n;
            INSERT INTO identity.refresh_sessions (status, updated_at)
            SELECT CASE WHEN n > {old} THEN 'Active' ELSE (ARRAY['Rotated', 'Revoked', 'Expired'])[1 + n % 3] END,
                   now() - interval '100 days'
            FROM generate_series(1, {old + young}) AS n;
            INSERT INTO refresh_tokens (is_revoked, expires_at)
            SELECT n % 5 = 0, now() + CASE WHEN n > {old} THEN interval '1 day' ELSE interval '-1 day' END
            FROM generate_series(1, {old + young}) AS n;
        """)

    def left(self) -> list[int]:
        """How many rows the three systems have."""
        counts = self.sql("""
            SELECT count(*) FROM identity.sign_in_confirmation_requests
            UNION ALL SELECT count(*) FROM identity.refresh_sessions UNION ALL SELECT count(*) FROM refresh_tokens
        """)
        return [int(count) for count in counts.split()]

    def configure(self, policies: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        """The job's configuration where its package has it: what is given, else without pause and night window."""
        config = configuration("dbname=auth", policies)
        for section in ("database", "run", "metrics"):
            config[section] = {**config[section], **sections.get(section, {})}
        self.put(tomli_w.dumps(config), "/etc/session-retention/config.toml", 0o640, "root:session-retention")

    def put(self, source: pathlib.Path | str, path: str, mode: int = 0o644, owner: str = "") -> None:
        """Put a file, or a text, into the guest: root's, unless an owner (`user:group`) is given."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        content = source.read_bytes() if isinstance(source, pathlib.Path) else source.encode()
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        target.chmod(mode)
        if owner:
            self.exec("chown", owner, path)

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """The entries of the guest's journal that match, all that has been logged since `forget`."""
        self._enter("journalctl", "--sync", check=True)
        # not by cursor: with a match, journalctl of Debian 12 leaves out the first entry after it
        since = f"--since=@{self.begin // 1_000_000}"
        lines = self._enter("journalctl", "--output=json", "--all", since, *matches, check=True).stdout
        entries = [json.loads(line) for line in lines.splitlines()]
        return [entry for entry in entries if int(entry["__REALTIME_TIMESTAMP"]) > self.begin]

    def forget(self) -> None:
        """Let `journal` begin here."""
        self.begin = int(self.journal()[-1]["__REALTIME_TIMESTAMP"])

    def events(self) -> list[str]:
        """What the job has logged, by the names of its events."""
        return [entry["EVENT"] for entry in self.journal("--identifier=session-retention") if "EVENT" in entry]

    def drop_in(self, unit: str, text: str) -> None:
        """Override settings of a unit, as `systemctl edit` does."""
        self.put(text, f"/etc/systemd/system/{unit}.d/override.conf")
        self.exec("systemctl", "daemon-reload")

    def install(self, package: pathlib.Path) -> str:
        """Install or upgrade a package as an administrator's script would: nobody answers a question."""
        self.put(package, f"/root/{package.name}")
        return self.exec("apt-get", "install", "--yes", "--allow-downgrades", f"/root/{package.name}").stdout

    def show(self, unit: str, name: str) -> str:
        """A property of a unit, as systemd has it now."""
        return self._enter("systemctl", "show", "--value", f"--property={name}", unit, check=True).stdout.strip()

    def reboot(self) -> None:
        """Boot again, with everything that is on its disk."""
        self._enter("systemctl", "reboot", check=True)
        self._wait_until_up()

    def stop(self) -> None:
        """Power off, as a machine that is shut down, and leave nothing behind."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.leader and self.process.poll() is None:
                self._enter("systemctl", "poweroff", check=False)
                self.process.wait(20)
        if self.process.poll() is None:
            for nspawn in children(self.process.pid):
                for pid in [*children(nspawn), nspawn]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        # nspawn makes the same groups in the hierarchy of systemd's own, where there is one
        for hierarchy in (self.group, CGROUPS / "systemd" / self.name):
            for group in sorted(hierarchy.glob("**/"), reverse=True):
                with contextlib.suppress(OSError):  # empty, unless a process is still on its way out
                    group.rmdir()
        self.console.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.work.rmdir()


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_init(pid: int) -> bool:
    """Is this process the first of its namespace, and does it answer as systemd?"""
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        first = any(line.split()[0] == "NSpid:" and line.split()[-1] == "1" for line in status.splitlines() if line)
        return first and pathlib.Path(f"/proc/{pid}/root/run/systemd/private").exists()
    return False
