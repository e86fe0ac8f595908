"""The error tree, and the mapping from exceptions to lines and exit codes."""

import errno
import io
import json
from pathlib import Path

import pytest

from fsl_async import errors
from fsl_async.cli import main
from fsl_async.errors import ExitCode, FslError, report


def reported(error, *, as_json=False, debug=False):
    out, err = io.StringIO(), io.StringIO()
    code = report(error, as_json=as_json, debug=debug, out=out, err=err)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FslError("no key; do this"), 2, "error: no key; do this\n"),
        (FslError("first line\n  second line\n"), 2, "error: first line; second line\n"),
        (FslError("go on elsewhere", 64), 64, "stopped: go on elsewhere\n"),
        (errors.ConfigError("a: b", "a"), 2, "error: a: b\n"),
        (errors.AddressError("x"), 2, "error: x\n"),
        (errors.RefusedError("no", "protocol"), 2, "error: no\n"),
        (errors.PreemptedError("the machine goes"), 64, "stopped: the machine goes\n"),
        (errors.InterruptedByUserError("interrupted"), 130, "stopped: interrupted\n"),
        (KeyboardInterrupt(), 130, "stopped: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), 2,
         "error: /run/x: No space left on device; make room and try again\n"),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2, "error: Address already in use\n"),
        (PermissionError(13, "Permission denied", b"/b"), 2, ("error: /b: Permission denied; it is"
         " not writable: check its permissions, or choose another\n")),
        (FileExistsError(17, "File exists", "/a"), 2,
         "error: /a: File exists; a file has that name: choose another\n"),
        (TimeoutError(), 2, "error: TimeoutError\n"),
        (MemoryError(), 2, "error: out of memory; use a smaller model or batch\n"),
        (ValueError("boom\nbang"), 1, ("error: unexpected ValueError: boom; bang (this is a bug in"
         " fsl-async; run again with --debug for the traceback)\n")),
    ],
)  # fmt: skip
def test_every_exception_is_one_line_and_a_code(error, code, line):
    """Users and launchers read exactly these."""
    assert reported(error) == (code, "", line)


def test_an_unknown_home_is_no_bug(capsys, monkeypatch):
    """A ~user that the machine does not have; ~ in a container without user name and HOME."""
    assert main(["keys", "list", "--keys", "~nobody-by-this-name/keys"]) == 2
    assert "the system has no such folder" in capsys.readouterr().err
    monkeypatch.setattr(Path, "home", lambda: Path("~").expanduser())
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    for variable in ("FSL_KEYS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert main(["keys", "list"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_torch_without_memory_is_no_bug():
    """A model may be too large for the planner or a client's GPU; torch has its own errors for
    that.
    """
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory")):
        code, _, err = reported(error)
        assert (code, err) == (2, "error: out of memory; use a smaller model or batch\n")
    assert reported(RuntimeError("something else"))[0] == 1


def test_json_is_one_object_on_standard_output():
    """A program that asked for JSON must find the error where it finds results."""
    code, out, err = reported(errors.DataError("data: too short"), as_json=True)
    assert err == ""
    assert out.count("\n") == 1
    assert json.loads(out) == {"error": "data: too short", "kind": "DataError", "exit_code": code}


def test_the_traceback_needs_debug():
    """A traceback is for developers, so only --debug prints it, before the line."""
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("inner")
    _, _, quiet = reported(caught.value)
    _, _, loud = reported(caught.value, debug=True)
    assert "Traceback" not in quiet
    assert loud.startswith("Traceback")
    assert loud.endswith(quiet)


def test_of_a_task_only_its_own_frames_are_shown():
    """The user's mistake is in the user's frames."""
    error = errors.TaskRaisedError("your task t.py:3 raised ValueError: boom", "the trace\n")
    assert reported(error) == (1, "", f"error: {error.message}\n")
    assert reported(error, debug=True)[2] == f"the trace\nerror: {error.message}\n"


def test_exit_codes_are_the_documented_ones():
    """Launch scripts depend on these numbers; the table in errors.py promises them."""
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "BUG": 1,
        "BAD_INPUT": 2,
        "RELAUNCH": 64,
        "INTERRUPTED": 130,
    }


def test_the_tree_in_the_docstring_is_the_tree():
    """The drawing at the top of errors.py must be complete."""
    drawn = errors.__doc__
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, FslError):
            assert name in drawn, name
