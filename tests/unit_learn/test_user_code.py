"""Finds a user's training function, or reports in one line why it was not found."""

import sys

import pytest

import fsl_async.learn.client.pretrain  # noqa: F401 - torch breaks when first imported into the copy of sys.modules below
from fsl_async.errors import TaskError, TaskRaisedError
from fsl_async.learn.user_code import load_task, own_failure

SOURCE = """
from dataclasses import dataclass
import neighbor_of_train
from os.path import join

@dataclass
class Settings:
    rate: float = neighbor_of_train.RATE

def train(fed):
    return Settings().rate

def two(fed, more):
    pass

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "neighbor_of_train.py").write_text("RATE = 0.5")
    (tmp_path / "train.py").write_text(SOURCE)
    return tmp_path


def test_a_file_and_a_module_can_be_named(folder):
    """Users keep training code in either; a file may import its neighbors."""
    assert load_task(f"{folder}/train.py:train")(None) == 0.5
    assert load_task("fsl_async.learn.client.pretrain:train") is load_task("")


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("train.py", "write it as file.py:function"),
        ("{}/train.py:", "write it as file.py:function"),
        (":train", "write it as file.py:function"),
        ("{}/gone.py:train", "there is no file .*gone.py"),
        ("{}/train.txt:train", "there is no file .*train.txt"),
        ("{}:train", "there is no file"),
        ("{}/train.py:tain", "has no function 'tain'; it has train, two"),
        ("{}/train.py:number", "has no function 'number'"),
        ("{}/train.py:two", "two must take one argument, fed"),
        ("{}/broken.py:train", "raised ZeroDivisionError at line 3: division by zero"),
        (
            "{}/missing.py:train",
            "raised ModuleNotFoundError at line 1: No module named 'nothing_here'",
        ),
        ("{}/syntax.py:train", "raised SyntaxError: .*syntax.py, line 1"),
        ("{}/exits.py:train", "raised SystemExit at line 1: 3"),
        ("no_such_package.module:train", "there is no module 'no_such_package' on the Python path"),
        ("json.nothing:train", "there is no module 'json.nothing'"),
        ("missing:train", "raised ModuleNotFoundError: No module named 'nothing_here'"),
        ("broken:train", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_every_way_to_get_it_wrong_is_one_line(folder, task, text):
    """A traceback of the loader's own frames does not help the user."""
    (folder / "broken.py").write_text("\n\n1 / 0")
    (folder / "missing.py").write_text("import nothing_here")
    (folder / "syntax.py").write_text("def train(fed:")
    (folder / "exits.py").write_text("raise SystemExit(3)")
    sys.path.insert(0, str(folder))
    with pytest.raises(TaskError, match=text) as caught:
        load_task(task.format(folder))
    assert "\n" not in str(caught.value)


def failure_of(task, fed=None):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind is the point
        task(fed)
    return own_failure(caught.value)


def test_what_a_task_raises_is_the_tasks_own(folder):
    """The error is attributed to the task, with the line that raised it."""
    (folder / "raises.py").write_text(
        "import json\n\n\ndef train(fed):\n    raise ValueError('boom\\nbang')\n\n\n"
        "def deeper(fed):\n    json.loads('{')\n\n\ndef silent(fed):\n    assert fed\n"
    )
    told = failure_of(load_task(f"{folder}/raises.py:train"))
    assert isinstance(told, TaskRaisedError)
    assert (told.message, told.exit_code) == (
        f"your task {folder}/raises.py:5 raised ValueError: boom; bang",
        1,
    )
    assert (
        "raises.py:9 raised JSONDecodeError: "
        in failure_of(load_task(f"{folder}/raises.py:deeper")).message
    )
    assert failure_of(load_task(f"{folder}/raises.py:silent")).message.endswith(
        "raises.py:13 raised AssertionError"
    )


def test_our_own_defect_stays_ours(folder):
    """An exception from this program is not attributed to the task, and the trace shows no frame of
    ours.
    """
    (folder / "calls.py").write_text("def train(fed):\n    fed()\n")
    train = load_task(f"{folder}/calls.py:train")
    assert failure_of(train, lambda: load_task(3)) is None

    told = failure_of(train)
    assert "calls.py" in told.trace
    assert "fsl_async/" not in told.trace
    assert told.trace.endswith("TypeError: 'NoneType' object is not callable\n")
