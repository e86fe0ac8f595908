"""Storms against real processes: which are found, what is injected, undone and logged."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fsl_async.cli import node as node_command
from fsl_async.commands import chaos as chaos_command
from fsl_async.errors import UsageError
from fsl_async.observe.journal import JournalReader
from fsl_async.tools.chaos import storm
from fsl_async.tools.chaos.storm import FILE, Fault, FaultLog, Storm, StormRunner
from fsl_async.tools.chaos.targets import KINDS, Held, Node, Run, link_of, nodes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
HERE = f"127.0.0.1:{10_000 + os.getpid() % 50_000}"
"""Where the run's parameter server listens: tests that run beside this one have other ones."""
IDLE = "import time\nwhile True: time.sleep(0.1)"


@pytest.fixture
def run(tmp_path):
    """A run's folder; its journal has the parameter server's address."""
    folder = tmp_path / "run"
    (folder / "clients" / "a").mkdir(parents=True)
    line = {
        "t": 1.0,
        "kind": "note",
        "type": "node_started",
        "role": "ps",
        "address": f"tcp://{HERE}",
    }
    (folder / "journal.jsonl").write_text(json.dumps(line) + "\n")
    return Run.at(folder, chaos_command.options_of)


@pytest.fixture
def process(tmp_path):
    """Starts processes with a node's command line: `python idle/fsl-node --role ...`."""
    script = tmp_path / "idle" / "fsl-node"
    script.parent.mkdir()
    script.write_text(IDLE)
    started = []

    def start(*words, journal=None):
        with contextlib.ExitStack() as files:
            kept = () if journal is None else (files.enter_context(journal.open("ab")).fileno(),)
            one = subprocess.Popen([sys.executable, str(script), *map(str, words)], pass_fds=kept)
        started.append(one)
        return one

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            one.kill()
        one.wait()


def state(process):
    """The process state: R, S, T (stopped), Z."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(ready, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def client(run, name, address=HERE):
    return (
        "--role",
        "client",
        "--name",
        name,
        "--run-dir",
        run.run_dir / "clients" / name,
        address,
    )


def test_only_processes_of_the_run_are_found(run, process, tmp_path):
    """Another run's processes, or commands that only name this run, must never be hit."""
    mine = [
        process("--role", "ps", "--run-dir", run.run_dir, "127.0.0.1:7100"),
        process(*client(run, "a", "127.0.0.1:9999")),  # through a proxy
        process("--role", "client", "--name=b", f"tcp://{HERE}"),
    ]
    process("--role", "ps", "--run-dir", tmp_path / "other", "127.0.0.1:7101")
    process("--role", "client", "--name", "c", "127.0.0.1:7101")
    process("status", run.run_dir)
    process(
        "--role",
        "client",
        "--name",
        "d",
        "--run-dir",
        run.run_dir.parent / "clients" / "d",
        "127.0.0.1:7101",
    )
    found = nodes(run)
    assert [(one.name, one.pid) for one in found] == [
        ("a", mine[1].pid),
        ("b", mine[2].pid),
        ("server", mine[0].pid),
    ]


def test_a_parameter_server_without_run_dir_is_found_by_its_journal(run, process, tmp_path):
    """Without --run-dir `chaos --server` once hit no process and printed nothing."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "journal.jsonl").touch()
    process("--role", "ps", journal=other / "journal.jsonl")
    process("--role", "ps")
    process("--role", "ps", "--run-dir", other, journal=run.run_dir / "journal.jsonl")
    process("--role", "server", journal=run.run_dir / "journal.jsonl")
    mine = process("--role", "ps", journal=run.run_dir / "journal.jsonl")
    until(lambda: nodes(run))
    assert nodes(run) == [Node(mine.pid, "server", "ps")]
    held = Held(run, nodes(run)[0])
    assert held.send(signal.SIGKILL)
    held.close()


NODE = ("--role", "client", "--name", "a", HERE)


@pytest.mark.parametrize(
    "before",
    [
        ["ssh", "edge", "fsl-node"],
        ["timeout", "600", "bin/fsl-node"],
        ["vim", "fsl-node"],
        ["bash", "bin/fsl-node"],
        ["python3", "wrapper.py", "bin/fsl-node"],
        ["python3", "-m", "pdb", "-m", "fsl_async.cli"],
        ["python3", "-c", "x", "fsl-node"],
        ["python3"],
        ["python3", "-m"],
        [],
    ],
)
def test_a_program_with_a_nodes_arguments_is_no_node(run, before):
    """Killing an ssh or a timeout would miss the client or hit the wrong process."""
    assert run.node([*before, *NODE], Path("/")) is None


@pytest.mark.parametrize(
    "before",
    [
        ["python3", "-m", "fsl_async.cli"],
        ["/v/bin/python3.11", "-P", "-X", "dev", "-m", "fsl_async.cli"],
        ["/v/bin/python", "/v/bin/fsl-node"],
    ],
)
def test_ways_to_start_a_node(run, before):
    """Nodes must be found by script and by module, also with options of Python."""
    assert run.node([*before, *NODE], Path("/")) == ("a", "client")


def test_values_of_options_are_not_the_address(run):
    """The value of --keys was once read as the address, so encrypted runs had no clients."""
    valued = {
        option
        for one in node_command.params
        if isinstance(one, click.Option) and not one.is_flag
        for option in one.opts
    }
    for option in sorted(valued - {"--role", "--run-dir", "--name"}):
        assert run.node(["python3", "fsl-node", *NODE, option, "x"], Path("/")) == ("a", "client")


@pytest.mark.parametrize(
    ("listens", "dials", "fits"),
    [
        ("tcp://127.0.0.1:7100", "localhost:7100", True),
        ("tcp://0.0.0.0:7100", "127.0.0.1:7100", True),
        ("tcp://0.0.0.0:7100", "127.0.0.1:7101", False),
        ("tcp://10.1.2.3:7100", "10.1.2.3:7100", True),
        ("tcp://10.1.2.3:7100", "127.0.0.1:7100", False),
        ("tcp://0.0.0.0:7100", "elsewhere.example.org:7100", False),
    ],
)
def test_clients_are_found_by_every_address_of_the_server(run, listens, dials, fits):
    """A wildcard address is dialed by many names; clients of other machines must not match."""
    found = Run(run.run_dir, chaos_command.options_of, listens).node(
        ["python3", "fsl-node", *NODE[:-1], dials], Path("/")
    )
    assert (found is not None) == fits


def test_a_reused_process_id_is_not_held(run, process):
    """Process ids are reused, so a lookup may be out of date."""
    other = process("--role", "client", "--name", "z", "127.0.0.1:7101")
    with pytest.raises(ProcessLookupError):
        Held(run, Node(other.pid, "a", "client"))
    gone = process(*client(run, "a"))
    node = Node(gone.pid, "a", "client")
    until(lambda: node in nodes(run))
    held = Held(run, node)
    gone.kill()
    gone.wait()
    assert not held.send(signal.SIGKILL)
    held.close()


def test_there_must_be_a_run(tmp_path):
    """A wrong directory must be an error before anything is written."""
    with pytest.raises(UsageError, match="holds no run"):
        Run.at(tmp_path, chaos_command.options_of)


def test_the_address_is_found_when_the_start_is_in_an_older_segment(tmp_path):
    """Clients are found by the address, so it must be known in long runs too."""
    line = {"t": 1.0, "type": "so_far", "state": {"node": {"address": "tcp://127.0.0.1:7100"}}}
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n")
    assert Run.at(tmp_path, chaos_command.options_of).address == "tcp://127.0.0.1:7100"


def logged(run_dir):
    """The lines of the fault log."""
    return JournalReader(run_dir / FILE).read_all()


def storming(run, faults, monkeypatch, **options):
    monkeypatch.setattr(Storm, "faults", lambda self, seconds: faults)
    return StormRunner(run, Storm(3600.0, KINDS), FaultLog(run.run_dir / FILE), **options)


def test_each_fault_is_logged_before_it_is_injected_and_undone(run, process, monkeypatch):
    """The report needs a complete log, and no client may stay stopped."""
    victim = process(*client(run, "a"))
    link = run.run_dir / "links" / "a"
    link.parent.mkdir()
    link.write_text("open")
    until(lambda: nodes(run))
    faults = [
        Fault(0.1, "stop", 0.4, 0.0),
        Fault(0.7, "partition", 0.3, 0.0),
        Fault(1.3, "slow", 9.0, 0.0),
    ]
    one = storming(run, faults, monkeypatch)
    seen, send = [], Held.send

    def watched(self, number):
        what = (
            [line["what"] for line in logged(run.run_dir)] if (run.run_dir / FILE).exists() else []
        )
        seen.append((number, what[-1:]))
        return send(self, number)

    monkeypatch.setattr(Held, "send", watched)
    one.play(1.6)
    assert (signal.SIGSTOP, ["begin"]) in seen
    assert state(victim) != "T"
    assert link.read_text() == "open"
    lines = list(logged(run.run_dir))
    assert [(line["what"], line.get("kind")) for line in lines] == [
        ("storm", None),
        *[(what, kind) for kind in ("stop", "partition", "slow") for what in ("begin", "end")],
        ("over", None),
    ]
    assert lines[1]["pid"] == victim.pid


def test_a_kill_kills_and_a_storm_without_victims_is_an_error(run, process, monkeypatch):
    """A fault without a victim, or on a link that cannot be cut, must be logged as missed."""
    victim = process(*client(run, "a"))
    until(lambda: nodes(run))
    one = storming(
        run,
        [
            Fault(0.0, "partition", 5.0, 0.0),
            Fault(0.1, "kill", 0.0, 0.0),
            Fault(0.3, "stop", 1.0, 0.0),
        ],
        monkeypatch,
    )
    one.play(0.6)
    assert victim.wait(10) == -9
    assert [line["what"] for line in logged(run.run_dir)] == [
        "storm",
        "missed",
        "begin",
        "end",
        "missed",
        "over",
    ]
    with pytest.raises(UsageError, match="no client of"):
        one.play(1.0)


def test_an_error_leaves_no_process_stopped(run, process, monkeypatch):
    """After Ctrl-C or any error, stopped processes must continue."""
    victim = process(*client(run, "a"))
    until(lambda: nodes(run))
    one = storming(run, [Fault(0.0, "stop", 60.0, 0.0)], monkeypatch)

    def stopped():
        if state(victim) == "T":
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        one.play(20.0, stopped)
    until(lambda: state(victim) != "T")


def test_all_processes_continue_when_the_disk_is_full(run, process, monkeypatch):
    """If the first fault's end cannot be logged, the second process must still continue."""
    victims = [process(*client(run, name)) for name in ("a", "b")]
    until(lambda: len(nodes(run)) == 2)
    one = storming(run, [Fault(0.0, "stop", 60.0, 0.0), Fault(0.0, "stop", 60.0, 0.0)], monkeypatch)
    write = FaultLog.write

    def full(self, what, **facts):
        if what == "end":
            raise OSError(28, "No space left on device")
        write(self, what, **facts)

    monkeypatch.setattr(FaultLog, "write", full)
    with pytest.raises(OSError, match="No space left"):
        one.play(20.0, lambda: all(state(victim) == "T" for victim in victims))
    until(lambda: all(state(victim) != "T" for victim in victims))


def test_a_link_that_is_cut_in_part_is_restored(run, process, monkeypatch):
    """When one direction is cut and the other fails, the first must be restored."""
    process(*client(run, "a"))
    until(lambda: nodes(run))
    link = run.run_dir / "links" / "a"
    link.parent.mkdir()
    link.write_text("open")

    def half(state):
        link.write_text(state)
        if state != "open":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(storm, "link_of", lambda *_: half)
    with pytest.raises(OSError, match="Input/output"):
        storming(run, [Fault(0.0, "partition", 60.0, 0.0)], monkeypatch).play(20.0)
    assert link.read_text() == "open"


def test_the_next_storm_undoes_what_a_killed_one_left(run, process, monkeypatch):
    """SIGKILL of the storm itself runs no `finally`."""
    victim = process(*client(run, "a"))
    link = run.run_dir / "links" / "a"
    link.parent.mkdir()
    link.write_text("cut")
    until(lambda: nodes(run))
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: state(victim) == "T")
    storming(run, [], monkeypatch).play(0.1)
    until(lambda: state(victim) != "T")
    assert link.read_text() == "open"


def test_a_seed_is_a_storm():
    """A storm must repeat by its seed, and have the chosen rate and kinds."""
    one, same, other = (list(Storm(125.0, KINDS, seed).faults(100 * 3600.0)) for seed in (1, 1, 2))
    assert one == same != other
    assert 11_800 < len(one) < 13_200
    assert {fault.kind for fault in one} == set(KINDS)
    assert all(fault.lasts_s == 0.0 for fault in one if fault.kind == "kill")
    assert all(2.0 <= fault.lasts_s <= 20.0 for fault in one if fault.kind != "kill")


def test_the_command_hits_and_reports(run, process):
    """The command must inject faults and print one JSON object."""
    process(*client(run, "a"))
    until(lambda: nodes(run))
    (run.run_dir / "ledger.jsonl").write_text("")
    made = [
        "--faults-per-hour",
        "36000",
        "--stop",
        "--away",
        "0.1",
        "0.2",
        "--for",
        "0.5s",
        "--json",
    ]
    result = CliRunner().invoke(
        chaos_command.command, [str(run.run_dir), *made], standalone_mode=False
    )
    assert result.exception is None
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["clients"] == 1
    assert found["faults"] == found["faults_by_kind"].get("stop", 0) >= 1


def test_a_client_without_a_link_of_its_own_has_none(run):
    """Without a link a partition is missed, so the lookup must return None."""
    assert link_of(run, Node(os.getpid(), "nobody", "client")) is None
