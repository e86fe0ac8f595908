"""Launchers with stand-ins of Slurm's programs, and the relauncher that calls them."""

import asyncio
import contextlib
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from fsl_async.cluster.launchers import (
    CommandLauncher,
    LaunchError,
    LeftAloneError,
    LocalLauncher,
    SlurmLauncher,
    ask,
)
from fsl_async.cluster.relauncher import AT_ONCE, Relauncher
from fsl_async.cluster.restarts import Launching, LaunchRule, RestartRules

STAND_INS = {
    "sbatch": 'echo "sbatch $*" >> "$DIR/asked"; [ -e "$DIR/full" ] && { echo "QOSMaxJobs" >&2; '
    'exit 1; }; cat "$DIR/answer"',
    "squeue": """echo "squeue $*" >> "$DIR/asked"
for word; do case $word in
    --name=*) name=,${word#--name=}, ;;
    --states=*) states=,${word#--states=}, ;;
    --format=*) [ "$word" = "--format=%i %T" ] || exit 1 ;;
esac; done
[ -e "$DIR/queue" ] || exit 0
while read -r number job state; do
    case ${name-,$job,} in *,$job,*)
        case ${states-,PENDING,RUNNING,COMPLETING,} in
            ,all, | *,$state,*) echo "$number $state" ;; esac ;;
    esac
done < "$DIR/queue"
""",
    "scancel": 'echo "scancel $*" >> "$DIR/asked"',
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder with stand-ins of Slurm's programs, first in PATH.

    The file `asked` has their command lines, `queue` the jobs of squeue (number, name, state).
    """
    for name, body in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nDIR={tmp_path}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "answer").write_text("17;cluster\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def asked(folder):
    return (folder / "asked").read_text().splitlines()


def test_slurm_submits_a_job_of_the_clients_name_and_cancels_what_never_began(slurm):
    """At the run's end a pending job would dial a parameter server that has ended."""

    async def play():
        launcher = SlurmLauncher()
        assert await launcher.launch("a", ["job.sbatch", "a"]) == "Slurm job 17"
        await launcher.close()
        await launcher.close()

    asyncio.run(play())
    assert asked(slurm) == [
        "squeue --noheader --me --name=fsl-a --states=all --format=%i %T",
        "sbatch --parsable --job-name=fsl-a job.sbatch a",
        "scancel --state=PENDING 17",
    ]


@pytest.mark.parametrize(
    "state", ["PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUE_HOLD"]
)
def test_slurm_does_not_submit_a_second_job(slurm, state):
    """A requeued or pending job is the client; two of them would replace each other."""
    (slurm / "queue").write_text(f"15 fsl-b RUNNING\n16 fsl-a {state}\n17 fsl-a COMPLETING\n")
    with pytest.raises(LeftAloneError, match=f"^Slurm has job 16 {state} for it$"):
        asyncio.run(SlurmLauncher().launch("a", ["job.sbatch"]))
    assert [line.split()[0] for line in asked(slurm)] == ["squeue"]


@pytest.mark.parametrize(
    ("queue", "left_alone"),
    [
        ("9 fsl-a FAILED\n10 fsl-a CANCELLED\n", True),
        ("9 fsl-a CANCELLED\n10 fsl-a FAILED\n", False),
        ("10 fsl-a PREEMPTED\n", False),
        ("10 fsl-a TIMEOUT\n11 fsl-b CANCELLED\n", False),
    ],
)
def test_a_job_that_a_person_cancelled_is_not_submitted_again(slurm, queue, left_alone):
    """`scancel` once lasted two minutes: then the launcher submitted the next job."""
    (slurm / "queue").write_text(queue)
    if left_alone:
        with pytest.raises(LeftAloneError, match=r"^its Slurm job 10 was cancelled; to "):
            asyncio.run(SlurmLauncher().launch("a", ["job.sbatch"]))
    else:
        assert asyncio.run(SlurmLauncher().launch("a", ["job.sbatch"])) == "Slurm job 17"


def test_a_job_that_is_completing_is_looked_at_again(slurm):
    """It may end or be requeued: a job submitted now may be a second one, so try again later."""
    (slurm / "queue").write_text("16 fsl-a COMPLETING\n")
    with pytest.raises(LaunchError, match="job 16 COMPLETING for it, which may be requeued"):
        asyncio.run(SlurmLauncher().launch("a", ["job.sbatch"]))


def test_the_first_job_of_a_client_is_found_as_the_template_says_to_submit_it(slurm):
    """Under another name it would be submitted again, and the two would replace each other."""
    template = (Path(__file__).parents[2] / "bin" / "fsl-node.sbatch").read_text()
    (usage,) = [line for line in template.splitlines() if line.startswith("#     sbatch ")]
    given = [line.split()[1] for line in template.splitlines() if line.startswith("#SBATCH ")]
    words = [word for word in [*given, *usage.split()] if word.startswith("--job-name=")]
    (slurm / "queue").write_text(f"16 {words[-1].removeprefix('--job-name=')} RUNNING\n")
    (client,) = re.findall(r"^# This client is called (\S+)\. ", template, re.MULTILINE)
    with pytest.raises(LeftAloneError, match="job 16 RUNNING"):
        asyncio.run(SlurmLauncher().launch(client, ["job.sbatch"]))


def test_slurm_that_refuses_or_talks_otherwise_is_an_error_in_one_line(slurm):
    """The operator needs Slurm's own message."""
    (slurm / "full").touch()
    with pytest.raises(LaunchError, match="sbatch exited with 1: QOSMaxJobs"):
        asyncio.run(SlurmLauncher().launch("a", ["job.sbatch"]))
    (slurm / "full").unlink()
    (slurm / "answer").write_text("Welcome to the cluster\n")
    with pytest.raises(LaunchError, match="no job number"):
        asyncio.run(SlurmLauncher().launch("a", ["job.sbatch"]))


def test_a_command_is_done_when_it_exits_0():
    """The error has ssh's output; a command that does not end is killed, a missing one named."""
    run = CommandLauncher().launch
    assert asyncio.run(run("a", ["true"])) == "done by true"
    with pytest.raises(LaunchError, match="sh exited with 3: no route; to host"):
        asyncio.run(run("a", ["sh", "-c", "echo no route; echo to host; exit 3"]))
    with pytest.raises(LaunchError, match=r"sleep did not end within 0\.1 s"):
        asyncio.run(ask(["sleep", "60"], 0.1))
    with pytest.raises(LaunchError, match="cannot run no-such-program: No such file"):
        asyncio.run(run("a", ["no-such-program"]))


def test_a_command_that_may_not_be_killed_is_not_waited_for(monkeypatch):
    """A command of sudo: the launch must fail at its time limit, with the same message."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    async def ask_and_see_it_end() -> None:
        with pytest.raises(LaunchError, match=r"sleep did not end within 0\.1 s"):
            await asyncio.wait_for(ask(["sleep", "1"], 0.1), 0.8)
        await asyncio.sleep(1.0)  # the loop gets its end

    monkeypatch.setattr(os, "killpg", refuse)
    uvloop.run(ask_and_see_it_end())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_what_a_program_leaves_running_is_not_waited_for(tmp_path, loop):
    """Under uvloop a client that a script had started kept the pipe open; it was launched again."""
    script = tmp_path / "start"
    script.write_text("#!/bin/sh\nsleep 60 >/dev/null 2>&1 </dev/null &\necho $!\n")
    script.chmod(0o755)
    printed = loop(ask([str(script)], limit_s=30.0))
    os.kill(int(printed), signal.SIGKILL)


@pytest.mark.parametrize("ends", ["timeout", "cancelled"])
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_program_that_does_not_end_takes_what_it_started_with_it(tmp_path, loop, ends):
    """A script waited for its ssh; the ssh remained, and its client beside that of the next
    attempt.
    """
    script, pid_file = tmp_path / "launch", tmp_path / "pid"
    script.write_text(
        f"#!/bin/sh\nsleep 60 &\necho $! >{pid_file}.new\nmv {pid_file}.new {pid_file}\nwait\n"
    )
    script.chmod(0o700)

    async def until(ready):
        async with asyncio.timeout(20.0):
            while not ready():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)

    async def main():
        limit_s = 1.0 if ends == "timeout" else 60.0
        asking = asyncio.ensure_future(ask([str(script)], limit_s))
        if ends == "cancelled":
            await until(pid_file.exists)
            asking.cancel()
        with pytest.raises(LaunchError if ends == "timeout" else asyncio.CancelledError):
            await asking
        await until(lambda: not lives(int(pid_file.read_text())))

    try:
        loop(main())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def lives(pid):
    """Whether a process of this number exists and has not ended."""
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True
    )
    return found.stdout.strip() not in {"", "Z"}


def test_no_room_for_a_programs_output_is_a_failed_launch(monkeypatch):
    """A full folder for temporary files, or no free descriptor, once ended the task without a
    message.
    """
    names = iter([tempfile.TemporaryFile])

    def none_left():
        for one in names:
            return one()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", none_left)
    with pytest.raises(LaunchError, match="cannot run true: No space left on device"):
        asyncio.run(ask(["true"]))
    with pytest.raises(LaunchError):  # for the first of them
        asyncio.run(ask(["true"]))


def test_a_program_that_prints_much_does_not_fill_the_disk(monkeypatch):
    """Only the end of its output is kept."""
    copies, make = [], tempfile.TemporaryFile

    def kept():
        file = make()
        copies.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", kept)
    script = """
import os, sys, time
for number in range(40):
    for file in (1, 2):
        os.write(file, (b"x" * 99 + b"\\n") * 2_000)
    time.sleep(0.02)
os.write(2, b"no node is free\\n")
sys.exit(3)
"""
    try:
        with pytest.raises(LaunchError, match=r"exited with 3: x.*no node is free$"):
            asyncio.run(ask([sys.executable, "-c", script]))
        sizes = [os.fstat(copy).st_size for copy in copies]
    finally:
        for copy in copies:
            os.close(copy)
    assert len(sizes) == 2
    assert max(sizes) < 40 * 200_000 * 0.8


def test_local_replaces_a_child_and_ends_it_with_the_run(tmp_path):
    """A client has one process, and none remains."""
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    log = tmp_path / "launched.log"

    def pids():
        return [int(line.split("| ")[1]) for line in log.read_text().splitlines()]

    async def play():
        launcher = LocalLauncher(log)
        for count in (1, 2):
            await launcher.launch("a", [sys.executable, "-c", script])
            give_up_at = time.monotonic() + 30.0
            while len(pids()) < count and time.monotonic() < give_up_at:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            if count == 2:
                with pytest.raises(ProcessLookupError):
                    os.kill(pids()[0], 0)
        await launcher.close()

    asyncio.run(play())
    assert len(pids()) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(pids()[1], 0)


class Stage:
    """A relauncher whose launcher is a stand-in; what it reports, launches and keeps.

    act: called with this object for each launch, returns what the launcher does.
    """

    def __init__(self, act, clients="*", wanted=True, budget=3):
        self.reports, self.launched, self.kept = [], [], []
        self.act, self.wanted = act, wanted
        rules = RestartRules(first_wait_s=0.01, budget=budget)
        self.launching = Launching((LaunchRule(clients, "local", ("go", "{address}")),), rules)
        self.keep = self.kept.append

    def play(self, events, seconds=0.3):
        """Let `events` happen to the relauncher on a real loop, then end it."""

        async def main():
            self.relauncher = Relauncher(
                asyncio.get_running_loop(),
                self.launching,
                "tcp://h:1",
                lambda what, _, text: self.reports.append((what, text)),
                wanted=lambda: self.wanted,
                launchers={"local": self},
                keeper=SimpleNamespace(keep=self.keep, close=lambda: asyncio.sleep(0)),
            )
            events(self.relauncher)
            await asyncio.sleep(seconds)
            await self.relauncher.close()

        asyncio.run(main())

    async def launch(self, client, words):
        """As a launcher does."""
        self.launched.append((client, *words))
        return await self.act(self)

    async def close(self):
        """End the children, which say goodbye; it takes a while for others."""
        if self.kept == [{"ends"}]:
            self.relauncher.left("ends", "bye", "relaunch 0: SIGTERM")
            await asyncio.sleep(0.2)


async def fails_once(stage):
    """As a launcher that is busy."""
    if len(stage.launched) == 1:
        raise LaunchError("no node is free")
    return "a thing"


async def finds(stage):
    """As Slurm, which has a job of the client."""
    raise LeftAloneError("Slurm has job 16 PENDING for it")


def died(relauncher):
    relauncher.seen("a")
    relauncher.left("a", "expired")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_relauncher_tries_again_and_reports_it(wanted):
    """From an expired session to the launcher, on a real loop; an ended run launches none."""
    stage = Stage(fails_once, wanted=wanted)
    stage.play(died)
    if not wanted:
        assert (stage.reports, stage.launched) == ([], [])
        return
    assert stage.launched == [("a", "go", "tcp://h:1")] * 2
    assert [what for what, _ in stage.reports] == ["waiting", "failed", "waiting", "launched"]
    assert stage.reports[1][1] == "a could not be launched again (no node is free)"
    assert stage.reports[3][1] == "launched a again by local: a thing"


def test_of_many_that_died_together_few_are_launched_at_once():
    """One machine must not start a hundred processes at once; all clients get their turn."""
    running, most = [], []

    async def slow(stage):
        running.append(None)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return "a thing"

    names = [f"c{number}" for number in range(3 * AT_ONCE)]

    def events(relauncher):
        for name in names:
            relauncher.seen(name)
        for name in names:
            relauncher.left(name, "expired")

    stage = Stage(slow)
    stage.play(events, 1.0)
    assert sorted(client for client, *_ in stage.launched) == sorted(names)
    assert max(most) == AT_ONCE


def test_a_client_that_has_a_job_is_not_reported_as_launched():
    """Nothing was launched, and it is not tried again."""
    stage = Stage(finds)
    stage.play(died)
    assert [what for what, _ in stage.reports] == ["waiting", "left alone"]
    assert stage.reports[1][1] == "a is not launched: Slurm has job 16 PENDING for it"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_restarted_parameter_server_lists_missing_clients_once(wanted):
    """Most of them join again at once, so one line is enough. An ended run launches none."""

    def events(relauncher):
        relauncher.recovered(frozenset({"a", "b", "c"}), 0.1)
        relauncher.seen("b")
        relauncher.seen("x")
        relauncher.seen("x")
        relauncher.left("x", "bye", "Ctrl-C")

    stage = Stage(fails_once, "[abx]*", wanted)
    stage.play(events, 0.5)
    assert stage.kept == [{"a", "b", "c", "x"}, {"a", "b", "c"}], "when it changes"
    assert [client for client, *_ in stage.launched] == (["a", "a"] if wanted else [])
    if wanted:
        assert stage.reports[0][1].endswith(
            "do not join again within 0.11 s are launched again: a, b"
        )


def test_children_that_end_with_the_parameter_server_stay_members():
    """Their goodbye requests a launch, which only the next parameter server may do."""
    stage = Stage(fails_once)
    stage.play(lambda relauncher: relauncher.seen("ends"), 0.0)
    assert (stage.reports, stage.launched, stage.kept) == ([], [], [{"ends"}])


def test_a_local_childs_exit_is_reported_unless_the_launcher_ended_it():
    """It comes seconds before the session expires; an end by the launcher is no death."""
    reports = []
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]

    async def play():
        launcher = LocalLauncher(exited=lambda *exit: reports.append(exit))
        await launcher.launch("a", [sys.executable, "-c", "raise SystemExit('error: no disk')"])
        await launcher.launch("b", sleeper)
        for _ in range(600):
            if reports:
                break
            await asyncio.sleep(0.05)
        await launcher.launch("b", sleeper)
        await launcher.close()

    asyncio.run(play())
    assert reports == [("a", 1, "no disk")]
