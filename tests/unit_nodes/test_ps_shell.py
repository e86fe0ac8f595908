"""The parameter server's shell: leases of shards, versions kept for fetches, and restarts."""

import numpy as np
import pytest
from attrs import evolve
from configs import roster_of
from deltas import delta_of
from ps_shells import FP32, AtOnce, Later, Server, publish, store_on

import fsl_transport as tp
from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.files.memory_files import MemoryDisk
from fsl_async.nodes.wire import Welcome, violation_in
from fsl_async.roles.machine import ClientLeft
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
from fsl_async.store.deltas.delta_kind import Seeds
from fsl_async.store.deltas.seed_step import Directions
from fsl_async.store.errors import CheckpointDamaged, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.outer import Average
from fsl_async.tools.sim.training import MANIFEST
from fsl_codecs import encode, encode_seeds

KEY = DeltaKey("a", 1, 0, 0)
OTHER = Manifest.from_shapes([("other", (3,))])


def test_a_client_that_fails_before_its_model_fits_takes_no_shard():
    """A wrong path or a wrong model at a site must not take a shard."""
    server = Server()
    assert server.hello("good") == 0
    server.attach("good")
    assert server.hello("wrong") == 1
    assert "taken" in server.hello("next"), "while it is connected, it may still attach"
    server.attach("wrong", OTHER)
    server.leave("wrong")
    assert server.hello("next") == 1
    server.attach("next")
    assert server.leases == {"good": 0, "next": 1}


def test_two_clients_that_have_not_attached_yet_get_different_shards():
    """A provisional lease excludes other clients."""
    server = Server()
    assert (server.hello("a"), server.hello("b")) == (0, 1)


def test_when_all_shards_are_taken_their_holders_are_named():
    """The line names the clients to reuse, and the setting to raise."""
    server = Server()
    for name in ("a", "b"):
        server.hello(name)
        server.attach(name)
    words = server.hello("c")
    assert "taken (by a, b)" in words
    assert "data.shards" in words
    assert "c is refused" in server.notes[-1]
    server.leave("a")
    assert server.hello("a", 2) == 0, "its lease is permanent"


def test_data_that_is_not_divided_has_a_part_for_each_client():
    """`sync.clients` is no limit where each site has its own data, as in fine-tuning."""
    config = with_implied(load(None, ["tune.method=lora", "sync.clients=2", "data.shards=2"]))
    server = Server(shards=config.shards)
    assert [server.hello(name) for name in "abc"] == [0, 1, 2]
    welcome = Welcome.from_wire(server.endpoint.last("welcome")[2])
    assert (welcome.shard, welcome.shards) == (2, 0)
    server.attach("c")
    assert Server(server.disk, shards=0).hello("c", 2, shard=2) == 2, "it may reconnect"


def test_groups_have_parts_that_follow_each_other():
    """Two groups of three clients: no two clients of them train on one part."""
    parts, roster = [], roster_of(["north", "south"])
    for name in ("north", "south"):
        server = Server(shards=3, name=name, roster=roster)
        parts += [server.hello(client) for client in "abc"]
    assert parts == list(range(6))
    assert Welcome.from_wire(server.endpoint.last("welcome")[2]).shards == 6
    again = Server(server.disk, shards=3, name="south", roster=roster)
    assert [again.hello("b", 2, shard=4), again.hello("c", 2, shard=1)] == [4, 5]


def test_a_lease_is_on_disk_before_the_welcome():
    """A parameter server killed after the welcome must not give the shard to another client."""
    server = Server(shards=3)
    assert server.hello("first") == 0
    assert server.leases == {"first": 0}
    assert "taken" in Server(server.disk, shards=1).hello("second"), "it may reconnect"
    again = Server(server.disk, shards=2)
    assert again.hello("second") == 1
    assert again.hello("first", shard=0) == 0
    again.attach("first")
    assert again.store._open.run.book.provisional == {"second"}


def test_a_client_is_not_welcomed_before_its_shard_is_written():
    """The shard in a welcome must be on disk."""
    worker = Later()
    server = Server(worker=worker)
    body = {"run": "", "version": -1, "digest": "", "shard": -1}
    for _ in range(2):  # the second hello must not overtake the first write
        server.shell.on_transport(tp.HelloReceived("a", 1, body, "client"))
    while worker.jobs:
        worker.jobs.pop(0)()
        if any(call[0] == "welcome" for call in server.endpoint.calls):
            assert server.leases == {"a": 0}
    assert server.endpoint.last("welcome")[2]["shard"] == 0


def test_a_client_that_lost_its_network_keeps_its_provisional_shard_for_a_minute():
    """Building a model takes time; a new client gets the shard only afterwards."""
    server = Server(shards=1)
    assert server.hello("slow") == 0
    server.shell.on_transport(tp.PeerDown("slow", 1, "expired"))
    assert "taken" in server.hello("new")
    server.scheduler.run_until(59.0)
    assert "taken" in server.hello("new", 2)
    server.scheduler.run_until(61.0)
    assert server.hello("new", 3) == 0
    assert server.leases == {"new": 0}
    assert "taken" in server.hello("slow", 2)


def test_a_client_keeps_the_shard_of_a_lost_parameter_server():
    """If the disk does not have the lease, no other client may get the same data."""
    server = Server()
    assert server.hello("late", shard=1) == 1
    server.attach("late")
    assert server.hello("new") == 0
    server = Server()
    server.hello("other")
    server.attach("other")
    assert "taken" in server.hello("late", shard=0), "another client trains on it"


def test_fewer_shards_after_a_restart_are_a_refusal():
    """A client must not be welcomed with a shard that does not exist."""
    server = Server(shards=3)
    for name in "abc":
        server.hello(name)
    assert "taken" in Server(server.disk, shards=2).hello("c")


def test_a_restarted_parameter_server_has_the_incarnations():
    """A client whose clock is behind must get a new incarnation."""
    server = Server()
    server.hello("a", 77)
    again = Server(server.disk)
    assert ("remember", "a", 77) in again.endpoint.calls


@pytest.fixture
def long_run():
    """A parameter server at version 5 that keeps two."""
    disk = MemoryDisk()
    store = store_on(disk)
    store.recover()
    publish(store)
    for version in range(1, 6):
        key = DeltaKey("a", 1, version - 1, version)
        delta = evolve(delta_of(key, 1), base_digest=store.digest)
        store.spool_begin(delta)
        for index in range(MANIFEST.chunks):
            values = np.ones(MANIFEST.chunk_values(index), np.float32)
            store.spool_write(key, index, encode(values, FP32))
        store.spool_finish(key)
        store.commit(version, [MergedDelta(delta, 0, 1.0)], 1.0)
    server = Server(disk)
    server.hello("a")
    server.attach("a")
    return server


def test_a_deleted_update_is_replaced_by_the_full_version(long_run):
    """The machine has digests of more versions than the disk has updates."""
    fetch = msg.to_wire(msg.Fetch(1, "1" * 32))
    long_run.shell.machine.deltas.digests[1] = "1" * 32
    long_run.shell.on_transport(tp.MessageReceived("a", fetch))
    assert long_run.endpoint.last("offer")[2] == "full:5"


def test_a_fetched_version_is_kept_until_its_client_holds_the_newest(long_run):
    """Otherwise a client on a slow path would fetch full versions forever."""
    digest = long_run.shell.machine.deltas.digests[4]
    long_run.shell.on_transport(tp.MessageReceived("a", msg.to_wire(msg.Fetch(4, digest))))
    assert long_run.endpoint.last("offer")[2] == "update:5"
    assert long_run.store._serving_from == 5
    holding = msg.to_wire(msg.Holding(5, long_run.store.digest))
    long_run.shell.on_transport(tp.MessageReceived("a", holding))
    assert long_run.store._serving_from is None


def test_a_client_that_breaks_the_protocol_again_and_again_is_one_line(long_run):
    """It is admitted, and must not fill the log."""
    before = len(long_run.notes)
    for _ in range(353):
        long_run.shell.on_transport(tp.MessageReceived("a", {"m": "fetch/1"}))
    (line,) = [text for text in long_run.notes[before:] if "broke the protocol" in text]
    assert line.startswith("a broke the protocol: ")
    fed = []
    long_run.shell.node.feed = fed.append
    long_run.shell.on_transport(tp.MessageReceived("a", {"m": "fetch/1"}))
    assert fed == [ClientLeft("a", 0, "protocol", "missing-field")]


def measured(server, sequence=1):
    """A delta of scalars, measured from version 0."""
    frame = encode_seeds(0, np.array([[[8.0, 0.5]]], np.float32))
    delta = msg.Measured(sequence, server.store.digest, 8, 4, frame)
    return tp.MessageReceived("a", msg.to_wire(delta))


@pytest.fixture
def scalars():
    """A parameter server of zeroth order at version 0, whose worker may be made to wait."""
    disk = MemoryDisk()
    directions = Directions(seed=1, steps=1, probes=2, rate=1.0)
    settings = {"kind": Seeds(directions), "outer": Average(), "history": 5}
    store = store_on(disk, **settings)
    store.recover()
    publish(store)
    store.close()
    worker = Later()
    worker.submit = AtOnce().submit
    server = Server(disk, worker=worker, store=store_on(disk, **settings))
    server.shell.machine.serving.history = 5
    server.hello("a")
    server.attach("a")
    return server


def test_a_version_that_scalars_are_measured_from_is_not_kept_any_more(scalars):
    """Such a client sends no Holding."""
    scalars.shell.on_transport(tp.MessageReceived("a", msg.to_wire(msg.Fetch(-1, ""))))
    assert scalars.store._serving_from == 0
    scalars.shell.on_transport(measured(scalars))
    assert scalars.store._serving_from is None


def test_a_delta_that_is_being_stored_is_not_judged_again(scalars):
    """Its client offers it again in a new session, when the version after its base is made."""
    server, worker = scalars, scalars.shell.context.jobs.worker
    del worker.submit
    server.shell.on_transport(measured(server))
    server.shell.machine.deltas.max_staleness = -1  # as if versions had been made since
    server.shell.on_transport(measured(server))
    worker.work()
    answers = [call[2]["m"] for call in server.endpoint.calls if call[0] == "send"]
    assert answers[-1] == "accepted/1"
    assert "declined/1" not in answers
    server.shell.on_transport(measured(server))
    assert server.endpoint.last("send")[2]["m"] == "accepted/1", "it is known"


def test_a_delta_that_could_not_be_stored_is_judged_again(scalars):
    server = scalars
    faults = server.disk.newest.faults
    faults.at, faults.mode, faults.failures = len(faults.calls) + 1, "error", 99
    server.shell.on_transport(measured(server))
    assert server.endpoint.last("send")[2]["code"] == "later"
    faults.at = 0
    server.shell.on_transport(measured(server))
    assert server.endpoint.last("send")[2]["m"] == "accepted/1"


@pytest.mark.parametrize(
    "body",
    [{}, {"m": "call/1", "round": 1}, {"m": "attach/3", "fingerprint": "f", "manifest": [1]}],
)
def test_a_bad_message_ends_its_session_only(body):
    """A peer's bad message never ends this process."""
    server = Server()
    server.hello("a")
    server.shell.on_transport(tp.MessageReceived("a", body))
    peer, reason = server.endpoint.last("disconnect")[1:]
    assert peer == "a"
    assert len(violation_in(reason)) > 8, "the client ends with what is wrong"
    assert server.shell.machine.members == {}
    assert server.hello("b") == 1
    assert server.hello("a", 2) == 0, "its shard is still leased"


def rejected(server):
    """The clients whose model was rejected."""
    sent = [call for call in server.endpoint.calls if call[0] == "send"]
    return [peer for _, peer, body in sent if body["m"] == "reject/1"]


def test_before_version_0_a_model_counts_while_a_client_has_it():
    """A first client with a wrong model that leaves must not fix the run's model."""
    server = Server(shards=4)
    for name, model in (("first", OTHER), ("same", OTHER), ("right", MANIFEST)):
        server.hello(name)
        server.attach(name, model)
    assert rejected(server) == ["right"]
    server.leave("first")
    server.hello("right", 2)
    server.attach("right")
    assert rejected(server) == ["right", "right"], "there is another one with that model"
    server.leave("same")
    server.hello("right", 3)
    server.attach("right")
    assert rejected(server) == ["right", "right"]
    assert server.shell.context.manifest == MANIFEST
    assert server.endpoint.last("send")[2]["m"] == "publish/1"


def test_initial_weights_of_another_model_are_declined():
    """With the same number of values, version 0 would have wrong names."""
    server = Server()
    server.hello("a")
    server.attach("a")
    offer = msg.to_wire(msg.InitialMeta(OTHER.fingerprint))
    server.shell.on_transport(tp.StreamOffered("a", "initial:a/1", offer, MANIFEST.chunks))
    assert server.endpoint.last("decline")[3] == "weights of another model"


def test_before_version_0_two_models_at_the_same_time():
    """The second one must not replace the first one while that one's lease is written."""
    worker = Later()
    server = Server(worker=worker)
    for name in ("a", "b"):
        body = {"run": "", "version": -1, "digest": "", "shard": -1}
        server.shell.on_transport(tp.HelloReceived(name, 1, body, "client"))
    worker.work()
    server.attach("a")
    server.attach("b", OTHER)
    worker.work()
    assert server.shell.context.manifest == MANIFEST
    assert rejected(server) == ["b"]


@pytest.mark.parametrize(
    ("effect", "method", "words"),
    [
        (do.Quarantine(KEY, "odd"), "quarantine", "the ledger cannot be written: a bad sector"),
        (do.Release(KEY), "release", "the ledger cannot be written: a bad sector"),
    ],
)
def test_an_end_by_a_disk_error_names_the_operation(monkeypatch, effect, method, words):
    """A full disk must not be reported as an unreadable spool."""

    def fails(*_, **__):
        raise StoreError("a bad sector")

    server = Server()
    monkeypatch.setattr(server.store.run, method, fails)
    server.shell.node._execute(effect, 1)
    assert len(server.ends) == 1
    assert server.ends[0].startswith(words)


def broken_store(monkeypatch, server, method, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(server.store, method, fails)


@pytest.mark.parametrize(
    ("effect", "method"), [(do.Commit(1, (), 1.0), "commit"), (do.VerifyVersion(0), "verify")]
)
def test_damage_ends_the_process_and_a_full_disk_does_not(monkeypatch, effect, method):
    """Damage stays; an operator can make space."""
    server = Server()
    broken_store(monkeypatch, server, method, StoreError("no room"))
    server.shell.node._execute(effect, 1)
    assert server.ends == []
    damage = CheckpointDamaged(5, "momentum.safetensors", 4, "is missing")
    broken_store(monkeypatch, server, method, damage)
    server.shell.node._execute(effect, 1)
    (reason,) = server.ends
    assert "version 5 is damaged: momentum.safetensors is missing" in reason
    assert "--from-version 4" in reason


def test_an_unreadable_version_is_reported_and_its_stream_ends(long_run, monkeypatch):
    """A client must not wait forever for the next chunk."""
    given = []
    broken_store(monkeypatch, long_run, "read_full", StoreError("a bad sector"))
    ask = tp.MessageReceived("a", msg.to_wire(msg.Fetch(-1, "")))
    long_run.shell.on_transport(ask)
    long_run.endpoint.last("offer")[4].read(0, given.append)
    assert (given, long_run.ends) == ([None], [])
    assert "cannot read a version: a bad sector" in long_run.notes
    broken_store(monkeypatch, long_run, "read_full", CheckpointDamaged(5, "w", None, "is missing"))
    long_run.shell.on_transport(ask)
    long_run.endpoint.last("offer")[4].read(1, given.append)
    assert given == [None, None]
    assert len(long_run.ends) == 1


def test_the_end_waits_for_a_delta_that_is_being_stored():
    """Its stream is over, so no transfer advances, but the delta has arrived."""
    worker = Later()
    disk = MemoryDisk()
    store = store_on(disk)
    store.recover()
    publish(store)
    server = Server(disk, worker=worker)
    server.endpoint.transfers = list
    seen = []
    server.shell.machine.handle = lambda event, now: seen.append(event) or []
    server.shell.node._execute(do.ReceiveDelta("a", "delta:1", delta_of(KEY, 1)), 1)
    worker.work()  # the spool is open, and the stream accepted
    for index in range(MANIFEST.chunks):
        frame = encode(np.ones(MANIFEST.chunk_values(index), np.float32), FP32)
        server.endpoint.last("accept")[3].write(index, frame, lambda _: None)
        worker.work()
    server.shell.on_transport(tp.StreamReceived("a", "delta:1"))
    server.shell.node._execute(do.CheckTransfers(), 2)
    assert seen[-1].advanced == ("a",)
    worker.work()
    server.shell.node._execute(do.CheckTransfers(), 3)
    assert seen[-2].tag == "delta_stored"
    assert seen[-1].advanced == ()
