"""Split learning by real processes: after kill -9 of any process at any moment, the run goes on
correctly.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ports import free_ports
from split_parties import LISTENS, Parties, lines_of

from fsl_async.observe.ledger_audit import audit_split_dir

pytestmark = pytest.mark.slow
ACTIVATION_BYTES = 2 * 16 * 32
"""Least bytes of an upload: a batch of two texts, 16 places, width 32, one byte for each value."""
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


class Killable(Parties):
    """Two clients, the parameter server and the split server, which a test starts and kills."""

    def __init__(self, site, **settings):
        chosen = {key.replace("__", "."): value for key, value in settings.items()}
        super().__init__(site.folder, ("a", "b"), chosen)
        self.site = site
        self.running = {}

    def start(self, *names):
        """Start processes at the same time, and wait until they are up."""
        for name in names:
            self.running[name] = self.site.start(*self.arguments(name))
        for name in names:
            self.running[name].wait_for(LISTENS.get(name, "joined run"))

    def kill(self, *names):
        """Kill -9."""
        for name in names:
            self.running[name].popen.send_signal(signal.SIGKILL)
        for name in names:
            self.running[name].kill()

    def go_on(self, rounds=1, seconds=90.0):
        """Wait until `rounds` more rounds are merged, with uploads of each client."""
        start, known = self.version(), len(self.uploads())
        deadline = time.monotonic() + seconds * UNIT_S
        while time.monotonic() < deadline:
            fresh = {key.split("/")[0] for key, _ in self.uploads()[known:]}
            if self.version() >= start + rounds and fresh == {"a", "b"}:
                return
            time.sleep(0.1)
        outputs = "\n---\n".join(process.text for process in self.site.processes)
        raise AssertionError(f"no more rounds after {start}:\n{outputs}")

    def finish(self):
        """End the run in good order."""
        self.running["ps"].signal(signal.SIGINT)
        assert self.running["ps"].end() == 130
        codes = {name: self.running[name].end() for name in ("a", "b", "server")}
        assert set(codes.values()) == {0}, codes


class Relayed(Killable):
    """As `Killable`, with a relay, the only address of the clients: one port for each of the two
    servers.
    """

    def __init__(self, site, **settings):
        super().__init__(site, **settings)
        self.places = [f"127.0.0.1:{free_ports(1)[0]}" for _ in range(2)]

    def arguments(self, name):
        """See `Parties`."""
        ps, split = (f"127.0.0.1:{self.ports[server]}" for server in ("ps", "server"))
        first, second = self.places
        if name == "relay":
            folder, port = self.folder / "relay", second.rpartition(":")[2]
            listens = ("--listen", first, "--split", f"{port}={split}")
            return ["--role", "relay", *listens, "--run-dir", folder, ps]
        words = super().arguments(name)
        if name in self.clients:
            words[-1] = f"fsl://{first}?split={second}"
        return words

    def bytes_up_of_relay(self):
        """Return for each process of the relay the bytes up of its ended connections, by server."""
        found = []
        for line in lines_of(self.folder / "relay" / "journal.jsonl"):
            if line["type"] == "node_started":
                servers, up = {}, {}
                found.append(up)
            elif line["type"] == "connection_accepted":
                servers[line["connection"]] = line["server"].rpartition(":")[2]
            elif line["type"] == "connection_ended":
                server = servers[line["connection"]]
                up[server] = up.get(server, 0) + line["up"]
        return found


class Together(Killable):
    """Both servers in one process, called "server"."""

    def __init__(self, site, **settings):
        super().__init__(site, **settings)
        self.ps_dir = self.server_dir.parent / "ps"

    def arguments(self, name):
        """See `Parties`."""
        more = ["--with-ps", f"127.0.0.1:{self.ports['ps']}"] if name == "server" else []
        return [*super().arguments(name), *more]

    def finish(self):
        """End the run in good order."""
        self.running["server"].signal(signal.SIGINT)
        assert self.running["server"].end() == 130
        assert [self.running[name].end() for name in self.clients] == [0, 0]


def check(parties):
    """Check what holds after any storm, and that there was something to compare."""
    assert parties.problems() == []
    assert all([parties.acknowledged("a"), parties.acknowledged("b")]), (
        "journals must have something to compare with"
    )
    return audit_split_dir(parties.server_dir)


def rounds_by_incarnation(parties, name):
    """Return the rounds of a client's trained uploads, a list for each incarnation."""
    found = {}
    for key, outcome in parties.uploads():
        client, incarnation, number, _ = key.split("/")[:4]
        if client == name and outcome == "trained":
            found.setdefault(int(incarnation), []).append(int(number))
    return [found[incarnation] for incarnation in sorted(found)]


def test_every_process_is_killed_once_and_the_run_goes_on(site):
    """A client, the split server, the parameter server, both: each loses only what docs/FAULTS.md
    says.
    """
    parties = Killable(site, split__method="fsl-sage")
    parties.start("ps", "server")
    parties.start("a", "b")
    parties.go_on()
    parties.kill("a")
    kept = audit_split_dir(parties.server_dir).auxiliary["a"]
    parties.start("a")
    parties.go_on()
    parties.kill("server")
    parties.start("server")
    parties.go_on()
    parties.kill("ps")
    parties.start("ps")
    parties.go_on()
    parties.kill("ps", "server")
    parties.start("ps", "server")
    parties.go_on(2)
    parties.finish()
    split = check(parties)
    assert split.lives == {"a": 2, "b": 1}
    first, second = rounds_by_incarnation(parties, "a")
    assert max(first) <= min(second), "it goes on with the data of the run's round"
    for name in ("a", "b"):
        # A version goes back only where the dead server had one that its checkpoint lacks.
        version, installed = -1, 0
        for each in parties.journal(name):
            if each["type"] in {"split_welcome", "node_started"}:
                version = -1
            elif each["type"] == "install_auxiliary":
                assert version < each["version"] <= split.auxiliary[name]
                version, installed = each["version"], installed + 1
        assert installed, "its journal must have something to compare with"
    again = parties.journal("a")
    started = [n for n, line in enumerate(again) if line["type"] == "node_started"][-1]
    after = [line["version"] for line in again[started:] if line["type"] == "install_auxiliary"]
    assert after[0] >= kept > -1, "its own auxiliary model, not the common start"


def test_both_servers_in_one_process_are_moved(site):
    """After SIGTERM neither of the two ends the run (docs/adr/0088)."""
    parties = Together(site, split__method="splitfed-v1")
    parties.start("server")
    parties.start("a", "b")
    parties.go_on()
    moved = parties.running["server"]
    moved.signal(signal.SIGTERM)
    assert moved.end() == 64, moved.text
    assert "leaving; the run goes on" in moved.text
    assert all(parties.running[name].popen.poll() is None for name in parties.clients)
    parties.start("server")
    parties.go_on()
    parties.finish()
    split = check(parties)
    assert split.lives == {"a": 1, "b": 1}, "the same clients went on"
    assert split.dropped == 0, "what it had trained is in its last checkpoint"


def test_a_relay_before_both_servers_is_killed(site):
    """Activations, gradients and models go through it: what it held is not trained twice, merged
    twice or lost.
    """
    parties = Relayed(site, split__method="splitfed-v1")
    parties.start("ps", "server")
    parties.start("relay")
    parties.start("a", "b")
    parties.go_on()
    parties.kill("relay")
    known = len(parties.uploads())
    parties.start("relay")
    parties.go_on(2)
    parties.finish()
    parties.running["relay"].signal(signal.SIGTERM)
    assert parties.running["relay"].end() == 64
    assert check(parties).lives == {"a": 1, "b": 1}, "the same clients dial again"
    up = parties.bytes_up_of_relay()[-1]
    assert set(up) == {str(parties.ports[server]) for server in ("ps", "server")}
    trained = sum(outcome == "trained" for _, outcome in parties.uploads()[known:])
    to_split_server = up[str(parties.ports["server"])]
    assert to_split_server > trained * ACTIVATION_BYTES > 0, "every upload went through the relay"


def test_the_demo_of_split_learning(tmp_path):
    """A client is killed, the loss falls, bytes are counted, and `status` agrees with the
    result.
    """
    node = [sys.executable, "-m", "fsl_async.cli"]
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"line {i} of a text that repeats itself, as texts do\n" for i in range(20_000))
    )
    run_dir = tmp_path / "run"
    words = ["demo", "split", "--clients", "2", "--rounds", "5", "--seed", "1", "--json"]
    done = subprocess.run(
        [*node, *words, "--data", str(text), "--run-dir", str(run_dir)],
        capture_output=True, text=True, timeout=100 * UNIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rounds"] == 5
    assert result["killed_s"] < result["back_s"]
    assert result["eval_loss"] < 5.5
    assert result["payload"]["activations up"] > result["coded"]["activations up"] > 0
    # Includes the killed client's first process. Bytes down may be coded for a client that is
    # killed before they are sent.
    coded_up = sum(size for name, size in result["coded"].items() if name.endswith("up"))
    assert result["sockets"]["up"] > coded_up
    shown = subprocess.run(
        [*node, "status", str(run_dir), "--json"],
        capture_output=True, text=True, timeout=60 * UNIT_S, check=True,
    )  # fmt: skip
    status = json.loads(shown.stdout)
    assert status["version"] == 5
    assert status["split_server"]["uploads"]["trained"] == result["uploads"]
    assert status["split_server"]["uploads"]["problems"] == []
    assert status["audit"]["lost"] == []
