"""What a script hands over: taken, or refused in its own line, and never at the wire."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from client_sides import Sides
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.events import Snapshotted
from fsl_transport.session import frames


def attached(kind=Fed):
    """A Fed with a model, what its log got, and the events of its training side."""
    lines = []
    context = ClientContext("alice", log=lines.append)
    sides = Sides(publishes=True)
    fed = Fed(sides.training, context) if kind is Fed else LocalFed(context)
    fed.attach(nn.Linear(1, 1))
    return fed, lines, sides


def delta_of_next_step(fed, sides, **given):
    """The delta that this step makes, as its receiver reads it."""
    sides.exchange.request_snapshot(1)
    assert fed.step(**given)
    made = next(one for one in sides.events if isinstance(one, Snapshotted))
    key = DeltaKey("alice", 1, 0, 1)
    delta = Delta(key, "0" * 32, made.tokens, made.steps, 0, made.metrics, made.facts)
    packed = frames.pack((msg.to_wire(msg.DeltaMeta(delta)),), 1 << 16)
    (read,) = frames.msgpack.unpackb(packed)
    return msg.from_wire(read).delta


@pytest.mark.parametrize(
    "tokens",
    [
        64,
        64.0,
        np.int64(64),
        np.float32(64),
        np.array([64]),
        torch.tensor(64),
        torch.tensor([64.0]),
    ],
)  # fmt: skip
def test_whole_numbers_of_any_kind_are_sent(tokens):
    """A mask's sum is a tensor, a batch's size often np.int64, and an average a float."""
    fed, _, sides = attached()
    delta = delta_of_next_step(fed, sides, tokens=tokens)
    assert delta.tokens == 64
    assert type(delta.tokens) is int


@pytest.mark.parametrize("kind", [Fed, LocalFed])
@pytest.mark.parametrize(
    "tokens",
    [
        64.5, math.nan, math.inf, -5, -0.5, 10**13, "64", None, True, 1j, [64], {},
        np.float64(2.5), torch.tensor([1, 2]), torch.empty(1, device="meta"), torch.tensor(True),
    ],
)  # fmt: skip
def test_other_tokens_are_refused_in_the_scripts_line(tokens, kind):
    """At the wire they are a session that ends again and again, or work that is never sent."""
    fed, _, _ = attached(kind)
    with pytest.raises(TaskError, match=r"^fed\.step: tokens is .*: give a whole number"):
        fed.step(tokens=tokens)
    assert fed.status()["step"] == 0
    if kind is Fed:
        with pytest.raises(TaskError, match=r"^fed\.end_round: samples is "):
            fed.end_round(samples=tokens)


@pytest.mark.parametrize("kind", [Fed, LocalFed])
def test_a_step_without_tokens_counts_one_and_says_so_once(kind):
    """With none, a delta has no weight, and nothing was ever sent."""
    fed, lines, _ = attached(kind)
    for _ in range(5):
        fed.step()
    assert fed.status()["tokens"] == 5
    assert len(lines) == 1
    assert "each step counts as 1" in lines[0]
    fed.step(tokens=0)
    assert fed.status()["tokens"] == 5


def test_metrics_of_any_kind_of_number_are_sent():
    """`metrics={"loss": loss}` with its graph is what people write; a warning would be an error."""
    fed, _, sides = attached()
    loss = torch.tensor(2.0, requires_grad=True) * 3
    given = {
        "loss": loss,
        "share": np.float32(0.5),
        "of": Fraction(1, 4),
        "hit": True,
        np.str_("n"): torch.tensor([7]),
    }
    found = delta_of_next_step(fed, sides, tokens=1, metrics=given).metrics
    expected = {"loss": 6.0, "share": 0.5, "of": 0.25, "hit": 1.0, "n": 7.0}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": "2.0"}, r"metrics\['loss'\] is '2.0', not a number"),
        ({"loss": None}, r"metrics\['loss'\] is None, not a number"),
        ({"loss": torch.ones(2)}, r"metrics\['loss'\] is a Tensor of shape \(2,\), not a number"),
        ({"loss": [1.0]}, r"metrics\['loss'\] is a list, not a number"),
        ({"loss": 1j}, r"metrics\['loss'\] is a complex, not a number"),
        ({"loss": 10**400}, r"metrics\['loss'\] is 1000.*, not a number"),
        (torch.tensor(2.0), "metrics is a Tensor: give numbers by name"),
        ([("loss", 2.0)], "metrics is a list: give numbers by name"),
        ({b"loss": 2.0}, "under a name that is text"),
        ({"": 2.0}, "under a name that is text"),
        ({"a" * 257: 2.0}, "under a name that is text"),
        ({"\ud800": 2.0}, "under a name that is text"),
    ],
)
@pytest.mark.parametrize("kind", [Fed, LocalFed])
def test_other_metrics_are_refused_by_name(metrics, words, kind):
    """A message that cannot be packed ended the client with a traceback of another thread."""
    fed, _, _ = attached(kind)
    with pytest.raises(TaskError, match=words):
        fed.step(tokens=1, metrics=metrics)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"epsilon": "1"}, r"returned\['epsilon'\] is '1', not a number"),
        ({"epsilon": math.nan}, "epsilon is nan, not a finite number"),
        ({"speed": 1.0}, "'speed' is none of rank, order"),
        (None, "is a NoneType"),
    ],
)
def test_facts_are_checked_at_the_call(facts, words):
    """The parameter server drops what it does not know, without a word."""
    fed, _, _ = attached()
    with pytest.raises(TaskError, match=r"^fed\.add_facts: .*" + words):
        fed.add_facts(lambda: facts)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("add_facts", {"epsilon": torch.ones(2)}),
        ("keep_position", {"data_at": 1.5}),
        ("keep_position", {"data_at": "1"}),
        ("keep_position", {"at": 1}),
    ],
)
def test_facts_of_a_delta_are_refused_in_the_step_that_makes_it(call, found):
    """A relaunched client would begin at a row that does not exist."""
    fed, _, sides = attached()
    with pytest.raises(TaskError, match="give a function"):
        getattr(fed, call)(found)
    given = {}
    getattr(fed, call)(lambda: given)
    given |= found
    sides.exchange.request_snapshot(1)
    with pytest.raises(TaskError, match=rf"^fed\.{call}: "):
        fed.step(tokens=1)


def test_scalars_of_a_round_are_an_array():
    """A list has no shape to compare with the run's."""
    fed, _, _ = attached()
    with pytest.raises(TaskError, match="scalars are a NumPy array"):
        fed.end_round(samples=1, scalars=[[1.0]])
