"""What loops of other frameworks count and hand over."""

import pytest
import torch
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client import loops
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed

LABELS = torch.tensor([[-100, -100, 3, 4], [5, -100, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "shifts", "trained"),
    [
        ({"labels": LABELS}, False, 3),
        ({"labels": LABELS}, True, 2),  # the 5 is first in its row: nothing predicts it
        ({"labels": LABELS, "shift_labels": LABELS[:, 2:]}, True, 2),
        ({"input_ids": torch.ones(7, 9), "labels": torch.ones(7, dtype=torch.long)}, True, 7),
        ({"input_ids": torch.ones(7, 9), "labels": torch.ones(7, 4)}, True, 7),  # several per row
        ({"input_ids": torch.ones(7, 9)}, True, 7),
        ((torch.ones(5, 2), torch.ones(5)), False, 5),
        (["names", {"deep": [torch.ones(6)]}], False, 6),
        (["names"], False, 0),
    ],
)
def test_trained_tokens_or_rows_are_counted(batch, shifts, trained):
    """They are the weight of a client's work; padding and prompts are none."""
    assert int(loops.trained_in(batch, shifts=shifts)) == trained


def test_an_address_is_given_or_in_the_environment(monkeypatch):
    """A script without a server must run as it did before, and say so."""
    lines = []
    monkeypatch.delenv("FSL_SERVER", raising=False)
    assert loops.address(None, None, {"log": lines.append}) is None
    assert lines == ["trains alone: no server is given, here or in FSL_SERVER"]
    monkeypatch.setenv("FSL_SERVER", "host:1")
    assert loops.address(None, None, {}) == "host:1"
    assert loops.address("host:2", None, {}) == "host:2"
    fed = LocalFed(ClientContext("alice"))
    assert loops.address(None, fed, {}) is None
    with pytest.raises(TaskError, match="no server and no options"):
        loops.address("host:2", fed, {})
    with pytest.raises(TaskError, match="no server and no options"):
        loops.address(None, fed, {"rank": 2})
    with pytest.raises(TaskError, match="by gradients"):
        loops.address("host:2", None, {"order": "zeroth"})


def test_copies_on_several_devices_are_refused():
    """One client is one model: copies of it would be averaged twice, or not at all."""
    loops.check_processes(1, 0)
    loops.check_processes(1, 1)
    loops.check_processes(2, 1, ranks=2)
    with pytest.raises(TaskError, match="as 2 processes, and this client has 1"):
        loops.check_processes(2, 1)
    with pytest.raises(TaskError, match="as 1 processes, and this client has 2"):
        loops.check_processes(1, 1, ranks=2)
    with pytest.raises(TaskError, match="on 4 devices"):
        loops.check_processes(1, 4)


@pytest.mark.parametrize(
    ("tune", "why"),
    [
        ({"method": "zeroth"}, "by losses alone"),
        ({"method": "lora", "rule": "ffa", "dp_epsilon": 4.0}, "adds no noise"),
        ({"method": "lora", "rule": "bank"}, "adapters of its own"),
    ],
)
def test_runs_that_such_a_loop_cannot_train(tune, why):
    """One line, before any weight is handed over."""
    model = nn.Linear(1, 1)
    model.peft_config = {}
    fed = LocalFed(ClientContext("alice", config={"tune": tune}))
    with pytest.raises(TaskError, match=why):
        loops.hand_over(fed, model)
    assert fed.model is None
