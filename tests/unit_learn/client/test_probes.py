"""Deltas of others at an evaluator: scored by hand on a few values, buffers included."""

import math

import numpy as np
import pytest
from deltas import key

from fsl_async.learn.client.ports import Harm, Moved, Orders
from fsl_async.learn.client.probes import MOST_LOSS, EvaluatorExchange
from fsl_async.roles.sync.messages import MOST_SCORED
from fsl_async.store.errors import LearnerError
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, encode

MANIFEST = Manifest.from_shapes([("weights", (2,))], buffers=[("buffers", (1,))])
BASE = np.array([1.0, 1.0, 5.0], np.float32)
A, B, C = key("a"), key("b"), key("c")
SENT = {A: [1.0, 0.0, 6.0], B: [0.0, 1.0, 8.0], C: [-4.0, -4.0, 0.0]}
"""A delta is what weights lost; of buffers it has the values."""
STRICT = Harm(0.0, 0.0)
SHARES = {A: 0.25, B: 0.25, C: 0.5}


def put(exchange, sent):
    """Have these deltas arrive."""
    for one, values in sent.items():
        for index in range(MANIFEST.chunks):
            part = np.array(values, np.float32)[slice(*MANIFEST.chunk_range(index))]
            exchange.put_delta(one, index, encode(part, CodecSpec(format="fp32")))


def scored(loss, *, harm=STRICT, shares=SHARES, sent=SENT):
    made, events = exchange_at(3, sent)
    answer(made, 3, loss, shares, harm)
    return events[0].found


def answer(exchange, version, loss=lambda vector: float(vector.sum()), shares=SHARES, harm=STRICT):
    """Have deltas scored as the training thread does."""
    exchange.score(version, shares)
    order = exchange._training.take()
    order.answer(loss, harm)


def test_losses_are_of_the_version_with_a_delta_and_of_the_mean_without_it():
    """By hand, on the sum of the weights; a share of a delta left out goes to the others."""
    found = scored(lambda vector: float(vector[:2].sum()))
    assert {one: numbers[:2] for one, numbers in found.items()} == {
        A: (2.0, -1.0), B: (2.0, -1.0), C: (2.0, 8.0),
    }  # fmt: skip
    # All: 2 - .25 - .25 + 4 = 5.5; without c: 2 - 1 = 1, and a and b are equal.
    assert [found[one][2] for one in (A, B, C)] == pytest.approx([0.0, 0.0, 4.5])


@pytest.mark.parametrize(
    ("moves", "better"),
    [
        # The mean is 3. Without a it is 2.5, as if that hurt; without c, 0, and then a is needed.
        ((4.0, -4.0, 9.0), (-16.0, -16.0, 9.0)),
        # The mean is 2.5, and further away without any one of them: the largest goes first.
        ((0.0, 0.0, 100.0, -90.0), (0.0, 0.0, 0.0, 900.0)),
        # It hurts less than is allowed.
        ((-1.0, -1.0, 2.1), (-0.301, -0.301, -0.999)),
    ],
)
def test_others_are_tried_again_without_the_worst(moves, better):
    """Beside a large delta an honest one looks as if it hurt, or a hostile one as if it did not."""
    keys = [key(name) for name in "abcd"][: len(moves)]
    sent = {one: [-move, 0.0, 0.0] for one, move in zip(keys, moves, strict=True)}
    found = scored(
        lambda vector: 1.0 + float(vector[0] - 1) ** 2,
        harm=Harm(0.02, 0.005),
        shares=dict.fromkeys(keys, 1.0),
        sent=sent,
    )
    assert [found[one][2] for one in keys] == pytest.approx(better, rel=0.01)


def test_buffers_are_taken_as_they_are_and_averaged():
    """They are values and no changes, so a sum of them would be no buffer."""
    found = scored(lambda vector: float(vector[2]), harm=Harm(math.inf, math.inf))
    assert {one: numbers[1] for one, numbers in found.items()} == {A: 1.0, B: 3.0, C: -5.0}
    assert found[C][2] == pytest.approx((0.25 * 6 + 0.25 * 8) - 7.0)


def test_products_have_no_mean_and_one_delta_no_other():
    """Then it is tried alone only."""
    for found in (
        scored(lambda vector: float(vector[0]), harm=None),
        scored(lambda vector: float(vector[0]), shares={A: 1.0}),
    ):
        assert {numbers[2] for numbers in found.values()} == {0.0}


def test_a_loss_that_is_not_finite_is_very_large():
    """Else its score could not be sent, and the delta would count."""
    found = scored(lambda vector: math.nan if vector[0] > 2 else 1.0)
    assert found[C][1] == MOST_LOSS - 1.0
    assert found[A][:2] == (1.0, 0.0)


@pytest.mark.parametrize(("which", "first", "count"), [(A, 1, 1), (A, 0, 3)])
def test_chunks_that_are_not_expected_are_refused(which, first, count):
    """A stream cannot fill the memory."""
    made, _ = exchange_at(3)
    made._frames = {}
    with pytest.raises(LearnerError):
        made.put_delta(which, first, *[b""] * count)


def exchange_at(version, sent=SENT):
    """Make an exchange whose model is on `version`."""
    events = []
    made = EvaluatorExchange(Orders(), on_event=events.append)
    made.attach(MANIFEST, BASE.copy())
    made.adopt_initial()
    made._base_version = version
    made.rebase(lambda _: Moved(), discard=False)
    put(made, sent)
    events.clear()
    return made, events


def test_only_the_version_of_the_question_is_scored():
    """Another one may have come meanwhile; the answer is then empty, and its machine goes on."""
    for version, count in ((3, 3), (4, 0)):
        made, events = exchange_at(3)
        answer(made, version)
        (found,) = events
        assert (found.version, len(found.found)) == (version, count)


@pytest.mark.parametrize("frames", [[b"damaged", b"damaged"], [b"damaged"], []])
@pytest.mark.parametrize("which", [A, B, C])
def test_a_damaged_delta_ends_nothing(which, frames):
    """The others are scored, as if it had not been asked about."""
    made, events = exchange_at(3)
    made._frames[which] = frames
    answer(made, 3)
    others = {one: share for one, share in SHARES.items() if one != which}
    assert events[0].found == scored(lambda vector: float(vector.sum()), shares=others)


def test_a_question_that_comes_again_changes_nothing_that_is_scored():
    """A session may end while the training thread scores; then all deltas come once more."""
    made, events = exchange_at(3)
    made.score(3, SHARES)
    made.put_delta(A, 0, b"of the next stream")
    made._training.take().answer(lambda vector: float(vector.sum()), STRICT)
    assert events[0].found.keys() == SHARES.keys()
    assert made._frames == {A: [b"of the next stream"]}


def test_questions_that_are_never_scored_fill_no_memory():
    """A parameter server may ask about versions that do not come, again and again."""
    made, _ = exchange_at(3)
    for number in range(2 * MOST_SCORED):
        made.put_delta(key("a", number), 0, b"")
    assert len(made._frames) == MOST_SCORED
    assert key("a", number) in made._frames
