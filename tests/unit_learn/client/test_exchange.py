"""Snapshots, deltas, fetches and rebases in any order, and between threads."""

import queue

import numpy as np
import pytest
import torch
from client_sides import Sides, Weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.roles.sync.events import Attached, Rebased, Snapshotted
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.errors import LearnerError
from fsl_async.store.model import manifest as manifest_module
from fsl_codecs import CodecSpec, decode, encode

FP32, BF16 = CodecSpec(format="fp32"), CodecSpec(format="bf16")
CHUNK_VALUES = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", CHUNK_VALUES)


class Server:
    """A parameter server in a few lines: one client, averaging, outer rate 1, no momentum."""

    def __init__(self, theta):
        self.versions = [theta]
        self.updates = [None]

    def merge(self, delta):
        """Make the next version from one delta."""
        before = self.versions[-1]
        frames = [encode(piece, FP32) for piece in chunks(-delta)]
        self.updates.append(frames)
        self.versions.append(before + np.concatenate([decode(frame) for frame in frames]))

    def give(self, client, version, kind="full"):
        """Let the client fetch a version; returns the digest it computed."""
        frames = (
            self.updates[version]
            if kind == "update"
            else [encode(piece, FP32) for piece in chunks(self.versions[version])]
        )
        client.exchange.begin_fetch(kind, version)
        for index, frame in reversed(list(enumerate(frames))):
            client.exchange.put_fetch(version, index, frame)
        return client.exchange.finish_fetch(version)


def chunks(vector):
    return [vector[i : i + CHUNK_VALUES] for i in range(0, len(vector), CHUNK_VALUES)]


def attached(model, codec=FP32):
    """Make a client whose own weights are version 0, in this thread: the event is answered at
    once.
    """
    client = Sides(DeltaCoder(codec), publishes=True)
    client.training.attach(model)
    return client


def taken(client, sequence):
    client.exchange.request_snapshot(sequence)
    assert client.step()
    frames = [
        client.exchange.encode_delta(sequence, i) for i in range(client.exchange.delta_chunks)
    ]
    return np.concatenate([decode(frame) for frame in frames])


def move(client, server, version, kind="full", dropped=0):
    digest = server.give(client, version, kind)
    assert digest == digest_of(server.versions[version])
    client.exchange.request_rebase(version, digest)
    assert client.training.attend()
    assert client.events[-1] == Rebased(version, dropped)


def test_own_weights_become_version_0():
    """The first client publishes what it built, to the bit."""
    model = Weights(start=0.1)
    client = attached(model)
    assert client.events == [Attached(client.exchange.manifest.fingerprint, 5), Rebased(0)]
    np.testing.assert_array_equal(decode(client.exchange.encode_initial(0)), model.numbers())
    with pytest.raises(LearnerError, match="cannot become version 0"):
        client.exchange.adopt_initial()


def test_a_later_client_receives_the_runs_weights():
    """A new node's weights never replace a running run's."""
    model, server = Weights(start=9.0), Server(np.arange(5, dtype=np.float32))
    client = Sides(
        take=lambda event: (
            client.exchange.request_rebase(0, server.give(client, 0))
            if isinstance(event, Attached)
            else None
        )
    )
    client.training.attach(model)
    np.testing.assert_array_equal(model.numbers(), server.versions[0])
    assert taken_nothing(client)


def taken_nothing(client):
    return not taken(client, 99).any()


OPERATIONS = ("train", "snapshot", "encode", "merge", "update", "full", "fetch", "rebase")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(-9, 9)), max_size=40),
    st.sampled_from([5, CHUNK_VALUES + 7]),
    st.sampled_from([FP32, BF16]),
)
def test_everything_trained_is_sent_once_in_any_interleaving(operations, values, codec):
    """Sent and unsent work add up to all that was trained, also where coding loses half.

    Whole numbers are exact in fp32, and bf16 makes others of them, so equality is exact in any
    order of operations. Deltas may be half coded at a rebase.
    """
    model = Weights(values, start=3.0)
    client = attached(model, codec)
    server = Server(model.numbers())
    pattern = np.arange(values, dtype=np.float32) % 7 * 101
    trained = np.zeros(values, np.float32)
    waiting = []  # taken, not yet merged
    held, sequence, tokens_sent, tokens_trained = 0, 0, 0, 0

    def merge():
        number = waiting.pop(0)
        client.exchange.finish_encoding(number)
        frames = [
            client.exchange.encode_delta(number, i) for i in range(client.exchange.delta_chunks)
        ]
        client.exchange.drop_delta(number)
        server.merge(np.concatenate([decode(frame) for frame in frames]))

    def snapshot():
        nonlocal sequence, tokens_sent
        sequence += 1
        waiting.append(sequence)
        client.exchange.request_snapshot(sequence)
        client.training.attend()
        tokens_sent += client.events[-1].tokens

    for operation, number in operations:
        latest = len(server.versions) - 1
        if operation == "train":
            model.add(pattern * number)
            trained += pattern * number
            tokens_trained += abs(number)
            client.step(tokens=abs(number))
        elif operation == "snapshot":
            snapshot()
        elif operation == "encode" and waiting:
            client.exchange.encode_delta(waiting[-1], 0)
        elif operation == "merge" and waiting:
            merge()
        elif operation == "update" and held < latest:
            held += 1
            move(client, server, held, "update")
        elif operation == "full":
            held = latest
            move(client, server, held)
        elif operation == "fetch" and held < latest:
            held += 1  # the base moves on, the model does not yet
            server.give(client, held, "update")
        elif operation == "rebase":
            client.exchange.request_rebase(held, digest_of(server.versions[held]))
            client.training.attend()
    snapshot()
    assert tokens_sent == tokens_trained
    while waiting:
        merge()
    if codec == FP32:
        np.testing.assert_array_equal(server.versions[-1], 3.0 + trained)
    move(client, server, len(server.versions) - 1)
    np.testing.assert_array_equal(model.numbers(), 3.0 + trained)


def test_work_done_while_a_delta_travels_is_kept_and_sent_next():
    """The rule of a rebase in numbers: theta <- Theta_new + (theta_now - u)."""
    model = Weights(start=10.0)
    client = attached(model)
    server = Server(model.numbers())
    model.add(1.0)
    first = taken(client, 1)
    assert (first == -1.0).all()
    model.add(2.0)
    server.merge(first * 4)  # as if other clients had moved it too
    client.exchange.drop_delta(1)
    move(client, server, 1, "update")
    assert (model.numbers() == 16.0).all()
    assert (taken(client, 2) == -2.0).all()
    assert client.events[-1].base == 1


def test_a_snapshot_has_tokens_steps_and_mean_metrics_since_the_last():
    """They give the delta's weight in a merge and the run's loss curve."""
    client = attached(Weights())
    client.step(5, {"loss": 4.0})
    client.exchange.request_snapshot(1)
    client.exchange.request_snapshot(1)
    client.step(6, {"loss": 2.0})
    event = client.events[-1]
    assert (event.sequence, event.base, event.tokens, event.steps) == (1, 0, 11, 2)
    assert event.metrics["loss"] == 3.0
    assert sum(isinstance(event, Snapshotted) for event in client.events) == 1
    assert client.training.meter.unsent_tokens == 0
    client.exchange.request_snapshot(2)
    client.step(1)
    assert client.events[-1].tokens == 1


def test_a_snapshot_tells_whether_steps_changed_a_weight():
    """An optimizer of other tensors trains nothing; a version of others is no change of its own."""
    model = Weights(CHUNK_VALUES + 9)
    client = attached(model)
    server = Server(model.numbers())

    def moved(sequence):
        taken(client, sequence)
        client.exchange.drop_delta(sequence)
        return client.events[-1].moved

    assert not moved(1)
    with torch.no_grad():
        model.w[-1] += 1.0
    assert moved(2)
    server.merge(np.ones(len(model.numbers()), np.float32))
    move(client, server, 1, "update")
    assert not moved(3)


def test_a_delta_sent_again_is_the_same_bytes_until_it_is_dropped():
    """A resumed stream is joined from chunks of both transfers."""
    model = Weights(1000)
    client = attached(model, CodecSpec(format="e4m3"))
    model.add(np.random.default_rng(0).normal(size=1000).astype(np.float32))
    client.exchange.request_snapshot(1)
    client.step()
    frame = client.exchange.encode_delta(1, 0)
    client.exchange.coder.spec = FP32
    assert client.exchange.encode_delta(1, 0) == frame
    client.exchange.drop_delta(1)
    with pytest.raises(LearnerError, match="delta 1 is not here"):
        client.exchange.encode_delta(1, 0)
    client.exchange.finish_encoding(1)


def test_full_weights_are_sent_unchanged_and_the_base_is_not_kept_for_it():
    """Where a run exchanges full weights, no difference rounds them."""
    model = Weights(start=1.0)
    client = attached(model)
    client.exchange.coder.whole = True
    base = model.numbers()
    model.add(np.float32(1e-7) - base)
    np.testing.assert_array_equal(taken(client, 1), model.numbers())
    client.exchange.drop_delta(1)
    server = Server(base)
    server.versions.append(np.full(5, 3.0, np.float32))
    move(client, server, 1)
    np.testing.assert_array_equal(model.numbers(), server.versions[1])


def test_non_finite_weights_are_sent_and_healed_by_the_next_version():
    """The parameter server quarantines them; the client must not keep NaN - NaN = NaN."""
    model = Weights()
    client = attached(model)
    server = Server(model.numbers())
    model.add(float("nan"))
    assert np.isnan(taken(client, 1)).all()
    assert client.events[-1].metrics["nonfinite"] == 1.0
    server.merge(np.full(5, -1.0, np.float32))
    client.step(tokens=8)
    move(client, server, 1, dropped=8)
    assert (model.numbers() == 1.0).all()
    # lost work is not counted either
    assert client.training.meter.unsent_tokens == 0
    model.add(2.0)
    assert (taken(client, 2) == -2.0).all()


def test_discard_takes_the_base_as_it_is():
    """After a quarantine it is ordered even if the weights are finite again."""
    model = Weights()
    client = attached(model)
    model.add(5.0)
    client.step(tokens=7)
    client.exchange.request_rebase(0, digest_of(np.zeros(5, np.float32)), discard=True)
    client.step()
    assert (model.numbers() == 0.0).all()
    assert client.training.meter.unsent_tokens == 0


def test_a_rebase_onto_the_version_held_moves_nothing():
    """It would remove work that is in flight."""
    model = Weights()
    client = attached(model)
    model.add(5.0)
    taken(client, 1)
    client.exchange.request_rebase(0, digest_of(np.zeros(5, np.float32)))
    client.step()
    assert (model.numbers() == 5.0).all()
    assert taken_nothing(client)


def test_a_later_version_with_the_weights_of_an_earlier_one_is_still_moved_onto():
    """Equal weights do not mean that nothing was merged in between."""
    model = Weights()
    client = attached(model)
    server = Server(model.numbers())
    model.add(2.0)
    server.merge(taken(client, 1))
    server.merge(np.full(5, 2.0, np.float32))  # another client undoes it
    move(client, server, 2)
    assert (model.numbers() == 0.0).all()


def give_global(client, server, version, since):
    """A version of the weights of all groups, as an update from an older one."""
    change = server.versions[version] - server.versions[since]
    client.exchange.begin_fetch("global", version)
    for index, piece in enumerate(chunks(change)):
        client.exchange.put_fetch(version, index, encode(piece, FP32))
    return client.exchange.finish_fetch(version)


@pytest.mark.parametrize("trains", [False, True])
def test_global_weights_lead_from_those_before(trains):
    """Whatever version the base is, and whatever refers to it; what was trained meanwhile stays."""
    model = Weights(CHUNK_VALUES + 5)
    client = Sides(DeltaCoder(FP32), publishes=True)
    exchange = client.exchange
    client.training.attach(model)
    server = Server(model.numbers())
    move(client, server, 0, "global_full")
    assert exchange.global_digest == digest_of(server.versions[0])
    random, since, unsent = np.random.default_rng(1), 0, 0.0
    for version in range(1, 10):
        server.merge(random.integers(-9, 9, CHUNK_VALUES + 5).astype(np.float32))
        if trains:
            model.add(1.0)
            unsent += 1.0
        if trains and version % 2:  # a delta refers to base and snapshot until it is coded
            assert (taken(client, version) == -unsent).all()
            unsent = 0.0
            exchange.drop_delta(version)
        if version % 3:
            move(client, server, version, "update")
        else:
            digest = give_global(client, server, version, since)
            assert digest == exchange.global_digest == digest_of(server.versions[version])
            exchange.request_rebase(version, digest)
            assert client.training.attend()
            since = version
        np.testing.assert_array_equal(model.numbers(), server.versions[version] + unsent)
    server.merge(np.ones(CHUNK_VALUES + 5, np.float32))
    move(client, server, 10, "global_full")
    assert exchange.global_digest == digest_of(server.versions[10])


def test_wrong_requests_are_refused_and_change_nothing():
    """A hostile peer cannot break the base."""
    model = Weights()
    client = Sides()
    with pytest.raises(LearnerError, match="no model"):
        client.exchange.encode_initial(0)
    with pytest.raises(LearnerError, match="no snapshot before"):
        client.exchange.request_snapshot(1)
    client = attached(model)
    zero = digest_of(model.numbers())
    with pytest.raises(LearnerError, match="does not follow base version 0"):
        client.exchange.begin_fetch("update", 2)
    assert client.exchange.global_digest == ""
    with pytest.raises(LearnerError, match="fetch it in full"):
        client.exchange.begin_fetch("global", 1)
    with pytest.raises(LearnerError, match="is not being fetched"):
        client.exchange.put_fetch(1, 0, b"")
    client.exchange.begin_fetch("update", 1)
    with pytest.raises(LearnerError, match="lacks 1 of 1 chunks"):
        client.exchange.finish_fetch(1)
    with pytest.raises(LearnerError, match="base is version 0"):
        client.exchange.request_rebase(1, zero)
    with pytest.raises(LearnerError, match="base is version 0"):
        client.exchange.request_rebase(0, "of another lineage")
    assert taken_nothing(client)


def test_vectors_are_as_few_as_promised():
    """Memory limits the model that a client can train: base and one more vector, as a rule."""
    model = Weights(1000)
    client = attached(model)
    server = Server(model.numbers())

    def vectors():
        found = [client.exchange._base, client.exchange._reference, client.exchange._spare]
        for delta in client.exchange._deltas.values():
            found += [delta.minuend, delta.subtrahend]
        return {id(vector) for vector in found if vector is not None}

    for sequence in range(1, 6):
        assert len(vectors()) <= 2
        model.add(1.0)
        server.merge(taken(client, sequence))
        assert len(vectors()) == 2
        known = vectors()
        move(client, server, sequence, "update")
        assert vectors() == known
        client.exchange.drop_delta(sequence)
    # two snapshots not coded yet hold vectors; a fetch codes them to free these
    client.exchange.request_snapshot(6)
    client.exchange.request_snapshot(7)
    client.step()
    assert len(vectors()) == 3
    server.merge(np.zeros(1000, np.float32))
    server.give(client, 6, "update")
    assert len(vectors()) <= 3
    assert all(delta.minuend is None for delta in client.exchange._deltas.values())


def test_a_snapshot_asked_by_another_thread_is_answered_at_the_next_step_while_training_goes_on(
    in_thread,
):
    """Training, loop and worker threads at once, as in production, for a hundred versions."""
    model = Weights(CHUNK_VALUES + 9, start=1.0)
    events = queue.Queue()
    client = Sides(take=events.put)
    done = [0]

    def train():
        client.training.attach(model)
        while True:
            model.add(1.0)
            done[0] += 1
            if not client.step():
                return

    def event(kind):
        found = events.get(timeout=20)
        assert isinstance(found, kind)
        return found

    wait = in_thread(train)
    event(Attached)
    client.exchange.request_rebase(0, client.exchange.adopt_initial())
    event(Rebased)
    server = Server(np.ones(CHUNK_VALUES + 9, np.float32))
    for version in range(1, 31):
        client.exchange.request_snapshot(version)
        event(Snapshotted)
        frames = [client.exchange.encode_delta(version, i) for i in range(2)]
        server.merge(np.concatenate([decode(frame) for frame in frames]))
        client.exchange.drop_delta(version)
        digest = server.give(client, version, "update" if version % 3 else "full")
        client.exchange.request_rebase(version, digest)
        event(Rebased)
    client.exchange.stop()
    wait()
    assert not client.step()
    np.testing.assert_array_equal(model.numbers(), np.float32(1.0 + done[0]))


COARSE = CodecSpec(format="uniform", step_log2=0)


def trained_in(rounds, values, *, stops=None, client=None):
    """Train Gaussian steps, of which each is a delta; returns what was trained and what was sent.

    stops: called with the number of each round, after its version was taken.
    """
    wanted, sent = np.zeros(values), np.zeros(values)
    server = Server(client.training.module.numbers())
    for number in range(1, rounds + 1):
        step = np.random.default_rng(number).standard_normal(values).astype(np.float32)
        client.training.module.add(step)
        wanted -= step
        delta = taken(client, number)
        sent += delta
        server.merge(delta)
        client.exchange.drop_delta(number)
        move(client, server, number, "update")
        if stops is not None:
            stops(number)
    return wanted, sent


def test_what_coding_loses_of_a_delta_is_sent_with_the_next():
    """Over 50 coarse deltas the sum lacks less than one coding error, and the model has it."""
    model = Weights(600)
    client = attached(model, COARSE)
    wanted, sent = trained_in(50, 600, client=client)
    lacks = wanted - sent
    assert 0.1 < np.linalg.norm(lacks) / np.sqrt(600) < 0.5
    np.testing.assert_allclose(model.numbers(), -wanted, atol=1e-4)


def test_a_snapshot_tells_what_the_delta_before_lacks():
    """`status` warns where it grows."""
    client = attached(Weights(600), COARSE)
    shares = []
    trained_in(3, 600, client=client, stops=lambda _: shares.append(client.events[-2].facts))
    assert "unsent" not in shares[0]
    assert 0.1 < shares[1]["unsent"] < 0.35


def test_what_was_trained_once_is_not_sent_again_and_again():
    """Rows of an embedding, of which each round trains other ones."""
    model = Weights(4096)
    client, server = attached(model, COARSE), Server(model.numbers())
    for number in range(1, 9):
        row = slice(512 * (number - 1), 512 * number)
        step = np.zeros(4096, np.float32)
        step[row] = np.random.default_rng(number).standard_normal(512)
        model.add(step)
        delta = taken(client, number)
        assert np.count_nonzero(delta[row]) > 200
        assert not np.delete(delta, np.r_[row]).any()
        server.merge(delta)
        client.exchange.drop_delta(number)
        move(client, server, number, "update")


@pytest.mark.parametrize("step_log2", [0, -4, 14])
def test_a_model_that_is_not_trained_any_more_sends_nothing(step_log2):
    """So its client is named at once, and its delta does not count."""
    model = Weights(600)
    client = attached(model, CodecSpec(format="uniform", step_log2=step_log2))
    trained_in(3, 600, client=client)
    for number in (4, 5):
        assert not taken(client, number).any()
        assert not client.events[-1].moved
        client.exchange.drop_delta(number)
    model.add(np.full(600, 5.0, np.float32))
    assert taken(client, 6).any()
    assert client.events[-1].moved


def test_without_error_kept_a_version_is_taken_as_it_is():
    """Some rules change the basis of adapters with each version: an error before has no meaning."""
    model = Weights(600)
    client = Sides(DeltaCoder(COARSE, keeps_error=False), publishes=True)
    client.training.attach(model)
    _, sent = trained_in(3, 600, client=client)
    np.testing.assert_allclose(model.numbers(), -sent, atol=1e-5)


def test_a_delta_dropped_while_it_is_coded_leaves_its_vector_alone(monkeypatch):
    """The next snapshot may already be in it."""
    model = Weights(600)
    client = attached(model, COARSE)
    model.add(np.random.default_rng(0).standard_normal(600).astype(np.float32))
    client.exchange.request_snapshot(1)
    client.step()
    code = DeltaCoder.encode

    def dropped(*given):
        client.exchange.drop_delta(1)
        return code(*given)

    monkeypatch.setattr(DeltaCoder, "encode", dropped)
    with pytest.raises(LearnerError, match="delta 1 is not here"):
        client.exchange.encode_delta(1, 0)
    monkeypatch.undo()
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", CHUNK_VALUES)
    assert taken_nothing(client)


@pytest.mark.parametrize("begun", [True, False])
def test_deltas_are_coded_in_order_and_before_the_model_moves(begun):
    """Each is measured from what coding has left of the ones before, and so is the model."""
    model = Weights(CHUNK_VALUES + 9)
    client = attached(model, BF16)
    server = Server(model.numbers())
    sent = []

    def train(sequence):
        model.add(1001.0)
        client.exchange.request_snapshot(sequence)
        client.step()

    train(1)
    server.merge(np.zeros(len(model.numbers()), np.float32))
    digest = server.give(client, 1, "update")  # delta 1 is coded; the model has not moved
    train(2)
    train(3)
    if begun:
        client.exchange.encode_delta(3, 1)
    client.exchange.request_rebase(1, digest)
    client.training.attend()
    for sequence in (3, 2, 1):
        frames = [client.exchange.encode_delta(sequence, index) for index in range(2)]
        sent.append(np.concatenate([decode(frame) for frame in frames]))
    lacks = 3 * -1001.0 - sum(sent)
    assert lacks.any()
    np.testing.assert_array_equal(model.numbers(), -lacks)
