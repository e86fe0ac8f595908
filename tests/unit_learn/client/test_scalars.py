"""A client of a run of zeroth order: scalars up, versions replayed, the model taken back."""

import numpy as np
import pytest
import torch
from client_sides import Sides, Weights

from fsl_async.errors import TaskError
from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.roles.sync.delta import ORDER
from fsl_async.roles.sync.events import Rebased, Snapshotted
from fsl_async.store.deltas.seed_step import Directions, frame_of, keys_of
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.errors import LearnerError
from fsl_async.store.model import manifest as manifest_module
from fsl_codecs import CodecSpec, add_signs, decode, decode_seeds, encode, encode_seeds

RUN = Directions(seed=9, steps=1, probes=5, rate=1e-2)
FP32 = CodecSpec("fp32")


def model_of(values=150):
    model = Weights(values)
    model.add(torch.linspace(-1, 1, values))
    return model


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", 64)


def attached(model, *, only_scalars=True):
    client = Sides(DeltaCoder(FP32), publishes=True)
    client.exchange.configure(
        FP32, keeps_error=True, whole=False, directions=RUN, only_scalars=only_scalars
    )
    client.training.expect_rounds()
    client.training.attach(model)
    return client


def scalars_of(seed):
    return np.random.default_rng(seed).standard_normal((1, 5)).astype(np.float32)


def end_round(client, number, scalars, tokens=8):
    """Train a round in this thread: what would hold the thread is let go beforehand."""
    client.exchange.begin_round(number + 1, number)
    assert client.training.next_round() == number
    client.training.meter.count(tokens, None)
    client.orders.hold = lambda _: None
    assert client.training.end_round(scalars)
    return client.events[-1]


def steps_between(since, version):
    return [RUN.step(number, scalars_of(number).ravel()) for number in range(since, version)]


def give(client, since, version):
    client.exchange.begin_fetch("seeds", version)
    client.exchange.put_fetch(version, 0, frame_of(steps_between(since, version)))
    digest = client.exchange.finish_fetch(version)
    client.exchange.request_rebase(version, digest)
    assert client.training.attend()
    return digest


def test_scalars_are_the_delta():
    client = attached(model_of())
    event = end_round(client, 0, scalars_of(3))
    assert event == Snapshotted(1, 0, 8, 1, {}, {ORDER: 0.0})
    assert client.exchange.delta_frames(1) == 1
    frame = client.exchange.encode_delta(1, 0)
    assert len(frame) == 44
    found = decode_seeds(frame)
    assert found.first == 0
    assert found.scalars.tobytes() == scalars_of(3).tobytes()
    client.exchange.finish_encoding(1)
    client.exchange.drop_delta(1)
    with pytest.raises(LearnerError):
        client.exchange.encode_delta(1, 0)


def test_300_missed_versions_are_replayed_from_one_frame():
    model = model_of()
    client = attached(model)
    expected = model.numbers()
    for step in steps_between(0, 300):
        add_signs(expected, 0, *keys_of([step]))
    assert len(frame_of(steps_between(0, 300))) == 6024
    assert give(client, 0, 300) == digest_of(expected)
    assert model.numbers().tobytes() == expected.tobytes()
    assert client.events[-1] == Rebased(300)


def test_steps_within_a_round_are_replaced_by_the_version():
    model = model_of()
    client = attached(model)
    expected = model.numbers()
    end_round(client, 0, scalars_of(0))
    model.add(5.0)  # local steps, if the task makes them in the model
    add_signs(expected, 0, *keys_of(steps_between(0, 1)))
    give(client, 0, 1)
    assert model.numbers().tobytes() == expected.tobytes()


def test_frames_of_other_versions_leave_the_base_alone():
    model = model_of()
    client = attached(model)
    client.exchange.begin_fetch("seeds", 3)
    for frame in (
        frame_of(steps_between(0, 2)),
        frame_of(steps_between(1, 3)),
        frame_of(steps_between(1, 4)),
        frame_of(steps_between(0, 4)),
        frame_of(steps_between(0, 3))[:-1],
        b"",
    ):
        with pytest.raises(LearnerError):
            client.exchange.put_fetch(3, 0, frame)
    with pytest.raises(LearnerError):
        client.exchange.put_fetch(3, 1, frame_of(steps_between(0, 3)))
    with pytest.raises(LearnerError, match="lacks"):
        client.exchange.finish_fetch(3)
    client.exchange.put_fetch(3, 0, frame_of(steps_between(0, 3)))
    client.exchange.put_fetch(3, 0, b"again")
    assert client.exchange.finish_fetch(3)


def test_scalars_need_a_run_that_has_them():
    client = Sides(DeltaCoder(FP32), publishes=True)
    client.training.expect_rounds()
    client.training.attach(model_of())
    with pytest.raises(LearnerError, match="do not follow"):
        client.exchange.begin_fetch("seeds", 1)
    with pytest.raises(TaskError, match="takes no scalars"):
        end_round(client, 0, scalars_of(0))


@pytest.mark.parametrize("scalars", [np.zeros((1, 4), np.float32), np.zeros((1, 5))])
def test_scalars_of_another_shape_end_the_task(scalars):
    client = attached(model_of())
    with pytest.raises(TaskError, match="1 x 5 fp32 scalars"):
        end_round(client, 0, scalars)


def test_scalars_that_are_not_finite_are_sent_and_marked():
    client = attached(model_of())
    bad = scalars_of(1)
    bad[0, 0] = np.nan
    event = end_round(client, 0, bad)
    assert event.metrics["nonfinite"] == 1.0
    assert client.exchange.encode_delta(1, 0) == encode_seeds(0, bad[None])


def test_in_a_run_of_both_orders_a_client_sends_either():
    model = model_of()
    client = attached(model, only_scalars=False)
    end_round(client, 0, scalars_of(0))
    assert client.exchange.delta_frames(1) == 1
    client.exchange.drop_delta(1)
    model.add(-0.5)
    # The version: the model goes back to it whole.
    expected = np.linspace(2, 3, 150, dtype=np.float32)
    client.exchange.begin_fetch("full", 1)

    for index, start in enumerate(range(0, 150, 64)):
        client.exchange.put_fetch(1, index, encode(expected[start : start + 64], FP32))
    client.exchange.request_rebase(1, client.exchange.finish_fetch(1))
    assert client.training.attend()
    assert model.numbers().tobytes() == expected.tobytes()
    model.add(-0.5)
    end_round(client, 1, None)
    assert client.exchange.delta_frames(2) == 3
    delta = np.concatenate([decode(client.exchange.encode_delta(2, i)) for i in range(3)])
    assert np.abs(delta - 0.5).max() < 1e-6
