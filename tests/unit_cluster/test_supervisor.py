"""The supervisor with real processes: output, relaunch, stop, and no process that remains."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import uvloop

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Deaths, Supervisor

FAST = RestartRules(first_wait_s=0.01, longest_wait_s=0.05, budget=3)


def python(name, script, **more):
    return Child(name, (sys.executable, "-c", textwrap.dedent(script)), **more)


def children():
    """Return the child processes of this one, running or not.

    Other tests may leave some, such as multiprocessing's resource tracker.
    """
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(stat.parent.name)
    return found


def run(main, loop_factory=None):
    """Run a coroutine and check that it leaves no task and no child process, even ended."""
    before = children()

    async def checked():
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(checked())
    assert children() <= before
    return result


def gone(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


async def lives(children, rules=FAST, log_path=None):
    heard, changes = [], []
    supervisor = Supervisor(
        log_path=log_path,
        on_line=lambda name, line: heard.append((name, line)),
        on_change=changes.append,
        rules=rules,
    )
    async with supervisor:
        for child in children:
            supervisor.start(child)
        codes = await supervisor.wait()
    return codes, heard, changes


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_output_of_both_streams_is_gathered_with_names(tmp_path, loop_factory):
    """One log has standard output and error of all, also long, broken and unfinished lines."""
    script = """
        import sys, os
        print("one")
        print("two", file=sys.stderr)
        os.write(1, b"\\xff bad\\r\\n" + b"x" * 300000 + b"\\nlast without end")
    """
    log = tmp_path / "deep" / "all.log"
    codes, heard, _ = run(lives([python("a", script)], log_path=log), loop_factory)
    assert codes == {"a": 0}
    lines = [line for _, line in heard]
    assert lines[:3] == ["one", "two", "\ufffd bad"]
    assert "".join(lines[3:-1]) == "x" * 300000
    assert max(map(len, lines)) <= 1 << 17  # no line grows without end
    assert lines[-1] == "last without end"
    written = log.read_text().splitlines()
    assert written[:2] == ["a | one", "a | two"]
    assert len(written) == len(heard)


def test_a_crashing_child_comes_back_and_a_finished_one_stays_away(tmp_path):
    """Exit 1, SIGKILL and 64 must be followed by a launch, exit 0 must not."""
    script = f"""
        import os, signal, sys
        path = {str(tmp_path / "count")!r}
        with open(path, "a") as file: file.write("x")
        n = os.path.getsize(path)
        if n == 1: sys.exit(1)
        if n == 2: os.kill(os.getpid(), signal.SIGKILL)
        if n == 3: sys.exit(64)
    """
    codes, _, changes = run(lives([python("a", script)]))
    assert codes == {"a": 0}
    assert [c.launch for c in changes if isinstance(c, ChildStarted)] == [1, 2, 3, 4]
    exits = [c for c in changes if isinstance(c, ChildExited)]
    assert [(c.code, c.why) for c in exits] == [
        (1, "exit code 1"),
        (-9, "killed by SIGKILL"),
        (64, "exit code 64"),
        (0, "exit code 0: done"),
    ]
    assert [c.relaunch_in_s for c in exits] == [0.01, 0.02, 0.04, None]


def test_bad_input_and_a_spent_budget_end_it():
    """A wrong command line fails again, and a child that always crashes must be given up."""
    children = [python("bad", "raise SystemExit(2)"), python("crash", "raise SystemExit(3)")]
    codes, _, changes = run(lives(children))
    assert codes == {"bad": 2, "crash": 3}
    last = {c.name: c for c in changes if isinstance(c, ChildExited)}
    assert last["bad"].why == "exit code 2: bad input"
    assert last["crash"].why == "exit code 3: gave up after 3 relaunches in a row"
    assert len([c for c in changes if isinstance(c, ChildStarted) and c.name == "crash"]) == 4


def test_the_last_error_of_a_child_is_kept():
    """Its error line is the command's verdict, else the end of its traceback."""
    kill = "import os; print('step 7', flush=True); os.kill(os.getpid(), 9)"
    children = [
        python("line", "print('error: no disk'); print('bye'); raise SystemExit(1)"),
        python("object", 'print(\'{"error": "full", "exit_code": 2}\'); raise SystemExit(2)'),
        python("trace", "raise ValueError('a\x1bb')"),
        python("killed", kill),
        python("done", "print('0.7 nats')"),
    ]
    _, _, changes = run(lives(children, RestartRules(budget=0)))
    errors = {one.name: one.error for one in changes if isinstance(one, ChildExited)}
    trace = errors.pop("trace")
    assert errors == {"line": "no disk", "object": "full", "killed": "", "done": ""}
    assert trace.startswith("ValueError: a")
    assert trace.isprintable()


def test_a_program_that_is_not_there_is_bad_input(tmp_path):
    """A typing error in a launch file must be reported once, not tried twenty times."""
    children = [Child("a", ("no-such-program",)), python("b", "", cwd=tmp_path / "no")]
    codes, heard, _ = run(lives(children))
    assert codes == {"a": 2, "b": 2}
    lines = dict(heard)
    assert lines["a"] == "error: no-such-program: No such file or directory"
    assert lines["b"].startswith("error: cannot start")


def test_a_killed_child_is_relaunched():
    """The demo kills a client with SIGKILL and shows that it returns."""

    async def main():
        ready, killed = asyncio.Queue(), []
        supervisor = Supervisor(
            on_line=lambda name, line: ready.put_nowait(line),
            on_change=lambda c: killed.append(c.code) if isinstance(c, ChildExited) else None,
            rules=FAST,
        )
        async with supervisor:
            supervisor.start(python("a", "import time; print('up'); time.sleep(60)"))
            await asyncio.wait_for(ready.get(), 10)
            first = supervisor.pid("a")
            with pytest.raises(ValueError, match="runs already"):
                supervisor.start(python("a", ""))
            assert supervisor.kill("a")
            await asyncio.wait_for(ready.get(), 10)
            assert supervisor.pid("a") != first
            assert supervisor.launches("a") == 2
            await supervisor.stop_child("a")
            assert supervisor.pid("a") is None
            assert not supervisor.kill("a")
        assert killed == [-9, -15]

    run(main())


def test_stop_sends_term_first_and_kill_later():
    """SIGTERM lets a node save; one that ignores it is killed after the grace time."""

    async def main():
        ready, codes = asyncio.Queue(), {}
        supervisor = Supervisor(
            on_line=lambda name, line: ready.put_nowait(line),
            on_change=lambda c: (
                codes.update({c.name: c.code}) if isinstance(c, ChildExited) else None
            ),
            rules=FAST,
        )
        polite = """
            import signal, sys, time
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(64))
            print("up")
            time.sleep(60)
        """
        deaf = """
            import signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("up")
            time.sleep(60)
        """
        supervisor.start(python("polite", polite))
        supervisor.start(python("deaf", deaf))
        supervisor.start(python("waiting", "raise SystemExit(1)"))
        for _ in range(2):
            await asyncio.wait_for(ready.get(), 10)
        start = time.monotonic()
        await supervisor.stop(grace_s=0.3)
        assert 0.25 < time.monotonic() - start < 5
        assert (codes["polite"], codes["deaf"]) == (64, -9)
        await supervisor.stop()

    run(main())


def test_stop_during_the_launch_ends_the_child():
    """Ctrl-C right after the start must not leave a process."""

    async def main():
        for turns in range(12):
            supervisor = Supervisor(rules=FAST)
            supervisor.start(python("a", "import time; time.sleep(60)"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.wait_for(supervisor.stop(grace_s=60.0), 10)
            assert supervisor.pid("a") is None

    run(main())


def test_what_a_killed_child_leaves_behind_goes_too():
    """Data loaders of a killed client hold memory and the GPU, so its process group must end."""
    script = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid)
        time.sleep(60)
    """

    async def main():
        ready = asyncio.Queue()
        supervisor = Supervisor(
            on_line=lambda name, line: ready.put_nowait(line), rules=RestartRules(budget=0)
        )
        async with supervisor:
            supervisor.start(python("a", script))
            grandchild = int(await asyncio.wait_for(ready.get(), 10))
            supervisor.kill("a")
            await asyncio.wait_for(supervisor.wait(), 10)
        return grandchild

    grandchild = run(main())
    wait_until(lambda: gone(grandchild))


def test_a_raising_callback_is_the_callers_error_and_ends_the_child():
    """The error must be raised, and no child may block on a full pipe."""

    async def main():
        def broken(name, line):
            raise ZeroDivisionError("display")

        supervisor = Supervisor(on_line=broken, rules=RestartRules(budget=0))
        supervisor.start(python("a", "while True: print('x' * 1000)"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(supervisor.wait(), 10)
        with pytest.raises(ZeroDivisionError):
            await supervisor.stop()

    run(main())


def test_a_cancelled_supervisor_leaves_no_process():
    """asyncio.run cancels on Ctrl-C, and no child may remain."""
    pids = []

    async def main(started):
        def changed(change):
            if isinstance(change, ChildStarted):
                pids.append(change.pid)
                started.set()

        async with Supervisor(on_change=changed) as supervisor:
            supervisor.start(python("a", "import time; time.sleep(60)"))
            await supervisor.wait()

    async def outer():
        started = asyncio.Event()
        task = asyncio.create_task(main(started))
        await asyncio.wait_for(started.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(outer())
    assert gone(pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_with_a_killed_supervisor():
    """After SIGKILL of the demo, or a closed terminal, no client may train on."""
    script = """
        import asyncio, sys
        from fsl_async.cluster.supervisor import Child, Supervisor
        async def main():
            supervisor = Supervisor(on_line=lambda name, line: print(line, flush=True))
            code = "import os, time; print(os.getpid()); time.sleep(60)"
            supervisor.start(Child("a", (sys.executable, "-c", code)))
            await supervisor.wait()
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: gone(child))


def died(name, error="no disk", wait_s=1.0, why="exit code 1"):
    return ChildExited(name, 1, 2.0, wait_s, why, error)


def counted(*ends):
    deaths = Deaths()
    for end in ends:
        deaths.add(end)
    return deaths


def test_each_error_is_one_line_the_most_frequent_first():
    """Twelve ends of one error are one fault, not twelve."""
    deaths = counted(
        died("b", "", why="killed by SIGSEGV"), *[died("b"), died("a")] * 2, died("a", "other")
    )
    assert deaths.lines() == [
        "a, b ended 4 times: no disk",
        "b ended: killed by SIGSEGV",
        "a ended: other",
    ]
    assert deaths
    assert not Deaths()
    assert Deaths().lines() == []


def test_children_are_hopeless_that_end_alike_three_times_or_for_good():
    """Waiting for them would end in a time limit, whose words name the wrong cause."""
    assert not counted(*[died("a")] * 2).are_hopeless(["a"])
    assert counted(*[died("a")] * 3).are_hopeless(["a"])
    assert not counted(died("a"), died("a"), died("a", "other")).are_hopeless(["a"])
    assert not counted(*[died("a")] * 3).are_hopeless(["a", "b"])
    assert counted(*[died("a")] * 3, died("b", wait_s=None)).are_hopeless(["a", "b"])
