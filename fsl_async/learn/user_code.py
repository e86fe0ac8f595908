"""Loads functions that a user names, such as `train.task`, and tells the user's errors from ours.

Does not import torch by itself.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fsl_codecs
from fsl_async.errors import TaskError, TaskRaisedError, one_line

Task = Callable[[Any], object]

BUILT_IN = "fsl_async.learn.client.pretrain:train"


def load_task(text: str) -> Task:
    """The function named "file.py:function" or "package.module:function"; "": the built-in task.

    Raises TaskError, as `load_function` does.
    """
    return load_function("task", text or BUILT_IN, ("fed",))


def load_function(what: str, text: str, arguments: Sequence[str]) -> Callable[..., object]:
    """The user's function that `text` names; it must take `arguments`. what: for error texts.

    A file's folder goes to the front of sys.path, as with `python file.py`, so that it can import
    its neighbors. Raises TaskError in one line: no such file or module, no such function, or what
    importing it raised.
    """
    label = f"{what} {text!r}"
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise TaskError(f"{label}: write it as file.py:function or package.module:function")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = load_module(label, Path(place).expanduser()) if is_file else _module(label, place)
    function = getattr(module, name, None)
    if not callable(function):
        here = [
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise TaskError(
            f"{label}: {place} has no function {name!r}; it has {', '.join(here) or 'none'}"
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        count = {0: "no", 1: "one"}.get(len(arguments), len(arguments))
        takes = ", ".join([f"{count} argument{'s' * (len(arguments) > 1)}", *arguments])
        raise TaskError(f"{label}: {name} must take {takes} ({error})") from error
    except ValueError:
        pass  # some callables written in C have no signature to look at
    found: Callable[..., object] = function
    return found


_OURS = (str(Path(__file__).parents[1]) + os.sep, fsl_codecs.__path__[0] + os.sep)
_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def own_failure(error: Exception) -> TaskRaisedError | None:
    """The error of an exception that left a task; None when it is not the task's but ours.

    Of the frames that belong to no library, the innermost decides: the task's own, then the task is
    at fault, also where a library that it called raised; one of this program (in `fed.step`, or in
    the built-in task), then it is a bug of ours.
    """
    frames = traceback.extract_tb(error.__traceback__)
    written = [
        frame
        for frame in frames
        if frame.filename.startswith(_OURS) or not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    if not written or written[-1].filename.startswith(_OURS):
        return None
    place = f"{written[-1].filename}:{written[-1].lineno}"
    kind = type(error).__name__
    said = one_line(str(error))
    shown = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    trace = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    trace += traceback.format_exception_only(error)
    text = f"your task {place} raised {kind}" + (f": {said}" if said else "")
    return TaskRaisedError(text, "".join(trace))


def load_module(label: str, path: Path, text: bytes | None = None) -> ModuleType:
    """Import a Python file; see `load_function`. text: of the file, where it was read already.

    Always from the text: what Python has compiled before is known by time and size alone.
    """
    if not path.is_file():
        raise TaskError(f"{label}: there is no file {str(path)!r}; is the path right?")
    path = path.resolve()
    name = f"fsl_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{label}: {path.name} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and multiprocessing look a class's module up here
    try:
        exec(compile(text or path.read_bytes(), path, "exec"), vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failure(label, error, path) from error
    return module


def _module(label: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise TaskError(
                f"{label}: there is no module {missing!r} on the Python path; a file is written as"
                " file.py:function"
            ) from error
        raise _import_failure(label, error) from error


def _import_failure(label: str, error: BaseException, path: Path | None = None) -> TaskError:
    """The error of what importing raised and, in the task's own file, where."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f" at line {lines[-1]}" if lines else ""
    what = one_line(str(error)) or "no message"
    return TaskError(f"{label}: importing it raised {type(error).__name__}{where}: {what}")
