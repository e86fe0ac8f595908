"""How a user's script ends: one line and an exit code for our errors, everything else as before."""

import subprocess
import sys
import threading

import pytest

from fsl_async.process import script

BEGIN = """
import sys
from fsl_async.errors import FslError, TaskError
from fsl_async.process.script import errors_in_one_line, leave_at_exit
from fsl_async.learn.client.ports import RunFinishedError
errors_in_one_line()
errors_in_one_line()
"""


def ended(text, *options):
    """Run a script; returns its exit code, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, *options, "-c", BEGIN + text],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("raised", "code", "out", "err"),
    [
        ("FslError('give an address')", 2, "", "error: give an address\n"),
        ("FslError('a bug', 1)", 1, "", "error: a bug\n"),
        ("RunFinishedError('the run has ended')", 0, "the run has ended\n", ""),
    ],
)
def test_an_error_of_ours_that_nothing_catches_is_one_line(raised, code, out, err):
    """A plain script has no clean_exit, and its user can act on the line alone."""
    assert ended(f"raise {raised}") == (code, out, err)


def test_the_line_names_the_scripts_own_line(tmp_path):
    """Without a traceback, "tokens is None" does not say which of ten calls it was."""
    path = tmp_path / "train.py"
    path.write_text(
        f"{BEGIN}from fsl_async.learn.client.script_values import whole\nwhole('tokens', None)\n"
    )
    done = subprocess.run(
        [sys.executable, path], text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: tokens is None: give a whole number")
    assert done.stderr.endswith(" (train.py:9)\n")
    assert done.stderr.count("\n") == 1


def test_other_errors_and_hooks_stay_as_they_are():
    """A bug of the script needs its traceback, and another library may report it."""
    code, out, err = ended("raise KeyError('x')")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback")
    own = "sys.excepthook = lambda *_: print('mine')\n"
    install = "errors_in_one_line()\n"
    assert ended(own + install + "raise KeyError('x')") == (1, "mine\n", "")
    assert ended(own + install + "raise FslError('ours')") == (2, "", "error: ours\n")


@pytest.mark.parametrize("kind", ["__IPYTHON__", "ps1"])
def test_interactive_sessions_stay_as_they_are(kind):
    """There an error must not end the session."""
    place = "builtins" if kind == "__IPYTHON__" else "sys"
    text = f"import builtins; sys.excepthook = sys.__excepthook__; {place}.{kind} = True\n"
    code, _, err = ended(text + "errors_in_one_line(); raise FslError('x')")
    assert code == 1
    assert err.startswith("Traceback")


def test_a_traceback_can_be_asked_for():
    """For a report of a bug, with Python's own switch."""
    code, _, err = ended("raise FslError('x')", "-X", "dev")
    assert code == 1
    assert "Traceback" in err


LEAVES = "taken_back = leave_at_exit(lambda error: print('left', repr(error)))\n"


@pytest.mark.parametrize(
    ("text", "code", "out"),
    [
        ("", 0, "left None\n"),
        ("sys.exit(3)", 3, "left None\n"),
        ("raise FslError('x')", 2, "left FslError('x')\n"),
        ("raise KeyError('x')", 1, "left KeyError('x')\n"),
        ("taken_back()", 0, ""),
    ],
)
def test_a_script_that_ends_leaves_with_its_error(text, code, out):
    """A script that is done sends its last work at exit; one that failed does not."""
    assert ended(LEAVES + text)[:2] == (code, out)


def test_a_script_leaves_before_what_other_libraries_do_at_exit():
    """Pyzmq sends nothing of some size after that."""
    text = LEAVES + "import atexit\natexit.register(print, 'a library ends')"
    assert ended(text) == (0, "left None\na library ends\n", "")


@pytest.mark.parametrize("raised", ["FslError('removed')", "KeyboardInterrupt"])
def test_what_leaving_raises_is_one_line(raised):
    """Python would print a traceback of an ignored exception."""
    text = f"def leave(_): raise {raised}\nleave_at_exit(leave)"
    code, _, err = ended(text)
    assert code == 0
    assert err in {"error: removed\n", "stopped: interrupted\n"}


def test_a_forked_process_does_not_leave():
    """The client is the parent's; a child that is a worker of a data loader only ends."""
    text = "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)"
    assert ended(LEAVES + text)[:2] == (0, "left None\n")


class _Unbuffered:
    """A stream that gives way to other threads at each write, as a write to a pipe does."""

    def __init__(self):
        self.written = []
        self.encoding = "ascii"

    def write(self, text):
        text.encode("ascii")
        self.written.append(text)

    def flush(self):
        pass


def test_a_line_is_one_write(monkeypatch):
    """`print` writes the text and then the line's end, and another thread writes in between."""
    out = _Unbuffered()
    monkeypatch.setattr(sys, "stdout", out)
    threads = [threading.Thread(target=script.print_line, args=(f"line {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out.written) == [f"line {n}\n" for n in range(8)]
    script.print_line("Zürich")
    assert out.written[-1] == "Z\\xfcrich\n"
    monkeypatch.setattr(sys, "stdout", None)
    script.print_line("to no console")
