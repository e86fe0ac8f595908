"""The shell of a parameter server in a roster: who may be a member, and what a stream must be.

And run directories and keys that do not fit the roster.
"""

# ruff: noqa: D102 - the stand-ins' methods mirror what they stand for

from types import SimpleNamespace

import numpy as np
import pytest
from configs import config_of, roster_of

import fsl_transport as tp
from fsl_async.config.settings import roster_of as servers_of
from fsl_async.errors import ConfigError, RunDirError
from fsl_async.nodes.ps.groups import GroupsShell, check_history, check_keys
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.groups.events import Decision, GroupsRecovered
from fsl_async.store.commit.groups_store import GroupsStore
from fsl_async.store.errors import StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode

MODEL = Manifest.from_shapes([("w", (10, 5)), ("b", (7,))])
KEY = "k" * 40


class Endpoint:
    """Records the calls of a listener or a dialer."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given))

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]

    def sent(self):
        return [msg.from_wire(call[1]) for call in self.of("send")]


class Now:
    """A worker that works at once, a clock that stands, and a journal that forgets."""

    def submit(self, job, done, failed):
        try:
            found = job()
        except Exception as error:  # noqa: BLE001 - as the worker does
            failed(error)
        else:
            done(found)

    def time(self):
        return 0.0

    def call_at(self, _when, _job):
        return self

    def cancel(self):
        pass

    def event(self, *_):
        return 0

    effect = fact = event


class Side:
    """A parameter server's shell of global rounds with a real store."""

    def __init__(self, folder, name):
        self.store = Store(folder / name, StoreSettings())
        self.store.recover()
        self.listener, self.dialer, now = Endpoint(), Endpoint(), Now()
        self.fed, self.said = [], []
        names = ("north", "south", "east")
        roster = ", ".join(f"{one}=fsl://127.0.0.1:7100?key={KEY}" for one in names)
        config = config_of("groups", name=name, roster=roster)
        self.node, self.manifest = self, None
        self.jobs = SimpleNamespace(committed=lambda *_: None)
        self.worker = self.scheduler = self.journal = now
        self.endpoint, self.say = self.listener, lambda note: self.said.append(note.text)
        self.shell = GroupsShell(config, self, None if config.leads else self.take)

    def take(self, handle):
        self.handle = handle
        return self.dialer

    def feed(self, event):
        self.fed.append(event)

    def begin(self):
        self.store.begin_initial(MODEL)
        weights = np.arange(MODEL.values, dtype=np.float32)
        self.store.write_initial(0, encode(weights, CodecSpec()))
        self.store.finish_initial()
        self.shell.start()

    def hello(self, peer, body, key=KEY):
        assert self.shell.is_of_groups(tp.HelloReceived(peer, 1, body, "group", key))
        self.shell.on_listener(tp.HelloReceived(peer, 1, body, "group", key))

    def get(self, peer, message):
        self.shell.on_listener(tp.MessageReceived(peer, msg.to_wire(message)))


HELLO = msg.to_wire(msg.GroupHello())


@pytest.fixture
def sides(tmp_path):
    made = Side(tmp_path, "north"), Side(tmp_path, "south")
    yield made
    for side in made:
        side.store.close()


def test_global_weights_that_could_not_be_written_are_tried_again(sides, monkeypatch):
    """The disk of the coordinator was full at version 0: no group would ever have begun."""
    north, _ = sides
    begin, disks = GroupsStore.begin, iter([StoreError("cannot write: disk full"), None])

    def written(store):
        if (error := next(disks, None)) is not None:
            raise error
        return begin(store)

    monkeypatch.setattr(GroupsStore, "begin", written)
    north.begin()
    assert north.shell.machine.round == -1
    assert "the next version tries again: cannot write: disk full" in north.said[-1]
    north.shell.version_made(1)
    assert north.shell.machine.round == 0
    north.shell.version_made(2)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"run": "", "version": -1, "digest": "", "shard": -1}, KEY),
        (HELLO, "x" * 40),
        (HELLO, ""),
        ({"m": "group_hello/9"}, KEY),
    ],
)
def test_a_name_of_the_roster_is_not_enough(sides, body, key):
    """A client under such a name, or another key, gets a refusal and no session."""
    north, _ = sides
    north.hello("south", body, key)
    assert not north.listener.of("welcome")
    assert [call[:2] for call in north.listener.of("refuse")] == [("south", "name")]


def test_only_the_coordinator_has_members(sides):
    """A parameter server that dials another member has a wrong roster."""
    north, south = sides
    north.hello("south", HELLO)
    assert north.listener.of("welcome") == [("south", msg.to_wire(msg.GroupWelcome()))]
    south.hello("east", HELLO)
    assert not south.listener.of("welcome")
    assert not north.shell.is_of_groups(tp.PeerDown("client", 1, "bye"))


def test_bad_bytes_cost_a_member_its_session(sides):
    """And not this process its life."""
    north, _ = sides
    north.begin()
    north.shell.on_listener(tp.PeerUp("south", 1, {}))
    north.shell.on_listener(tp.MessageReceived("south", {"m": "view/1", "round": "x"}))
    assert north.listener.of("disconnect") == [("south", "protocol")]
    north.shell.on_listener(tp.StreamOffered("south", "s", {}, 1))
    assert north.listener.of("decline")


def arriving(north, south):
    """South asks for global weights; returns the offered stream's id, metadata and source."""
    north.begin()
    south.shell.start()
    assert south.dialer.of("connect")
    south.handle(tp.PeerUp("", 1, {}))
    north.shell.on_listener(tp.PeerUp("south", 1, {}))
    (ask,) = south.dialer.sent()
    north.get("south", ask)
    ((_, decided),) = north.listener.of("send")
    south.handle(tp.MessageReceived("", decided))
    fetch = msg.from_wire(south.dialer.of("send")[-1][1])
    assert fetch == msg.FetchGlobal(0, model=True)
    north.get("south", fetch)
    model = north.listener.of("send")[-1][1]
    south.handle(tp.MessageReceived("", model))
    ((peer, stream, meta, source),) = north.listener.of("offer")
    assert (peer, stream) == ("south", "global:0")
    return meta, source


def test_an_address_that_comes_early_is_not_lost(sides):
    """The worker may be busy when a view comes; the others' helpers do not wait for it."""
    north, _ = sides
    north.begin()
    cut = north.store.groups.take_cut(0)
    north.shell.process = Endpoint()
    jobs = []
    north.worker = type("Later", (), {"submit": lambda _, *job: jobs.append(job)})()
    shares = [("north", cut.digest, 0.5), ("south", cut.digest, 0.5)]
    north.shell._execute(do.StartReduction(msg.View(0, 1, shares, 1024), 0), 0)
    north.shell._execute(do.PassAddress("rank-1", b"there"), 0)
    assert north.shell.process.calls == []
    ((job, done, _),) = jobs
    done(job())
    assert [name for name, *_ in north.shell.process.calls] == ["reduce", "address"]
    north.shell._execute(do.PassAddress("rank-2", b"there"), 0)
    assert north.shell.process.of("address") == [("rank-1", b"there"), ("rank-2", b"there")]


def test_a_new_group_gets_model_and_weights(sides):
    """By one stream, whose digest is that of the decision; then it asks its group to adopt them."""
    north, south = sides
    meta, source = arriving(north, south)
    south.handle(tp.StreamOffered("", "global:0", meta, source.chunks))
    ((_, _, sink),) = south.dialer.of("accept")
    for index in range(source.chunks):
        source.read(
            index, lambda frame, index=index: sink.write(index, frame, lambda ok: ok or 1 / 0)
        )
    south.handle(tp.StreamReceived("", "global:0"))
    (brought,) = south.fed
    assert (brought.decision.digest, brought.counted) == (north.store.digest, False)
    south.shell.adopt(brought, 0)
    assert south.store.digest == north.store.digest
    assert south.manifest.fingerprint == MODEL.fingerprint
    assert south.shell.machine.round == 0


def test_other_streams_are_declined(sides):
    """Not asked for, of another round, or of another size."""
    north, south = sides
    meta, source = arriving(north, south)
    other = {**meta, "round": 7}
    south.handle(tp.StreamOffered("", "global:7", other, source.chunks))
    south.handle(tp.StreamOffered("", "global:0", meta, source.chunks + 1))
    reasons = [call[-1] for call in south.dialer.of("decline")]
    assert reasons == ["not wanted", "wrong number of chunks"]
    assert not south.dialer.of("accept")
    assert any("did not arrive" in line for line in south.said)


def test_a_refused_member_says_so_once_and_dials_again(sides):
    """The coordinator's operator may still have to change the roster there."""
    _, south = sides
    south.shell.start()
    for _ in range(3):
        south.handle(tp.Refused("name", "groups.roster has another key for south"))
    assert len([line for line in south.said if "another key" in line]) == 1


# --- a run directory and a place in a roster that do not go together ---

ROSTER = ("north", "south")
BEGUN, HELD = (Decision(number, number, str(number) * 32, "5" * 32) for number in (0, 2))


@pytest.mark.parametrize(
    ("name", "version", "state", "words"),
    [
        ("south", 3, GroupsRecovered(), "would replace: give a new --run-dir"),
        ("north", 9, GroupsRecovered(HELD), "put that one first again"),
        ("north", 9, GroupsRecovered(HELD, decided=BEGUN), "lacks the decision of global w"),
    ],
)
def test_a_past_that_would_be_lost_or_not_continued_is_one_line(name, version, state, words):
    """A member's own run would be overwritten; a member that is made the first has no decisions."""
    with pytest.raises(RunDirError, match=words):
        check_history(config_of("groups", name=name, roster=roster_of(ROSTER)), version, state)


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("south", -1, GroupsRecovered()),
        ("south", 4, GroupsRecovered(HELD)),
        ("north", -1, GroupsRecovered()),
        ("north", 3, GroupsRecovered()),
        ("north", 4, GroupsRecovered(BEGUN, decided=BEGUN)),
    ],
)
def test_new_groups_and_those_that_go_on(name, version, state):
    """The first one may bring a run of its own into the groups."""
    check_history(config_of("groups", name=name, roster=roster_of(ROSTER)), version, state)


KEYED = "north=fsl://10.0.0.1:7100?key=" + "k" * 40
PLAIN = "south=fsl://10.0.0.2:7100"


@pytest.mark.parametrize(
    ("has_keys", "words"), [(True, "south has no key"), (False, "north has a key, and")]
)
def test_all_parameter_servers_encrypt_or_none(has_keys, words):
    """One without a key would dial for ever, or send in the clear what others encrypt."""
    with pytest.raises(ConfigError, match=words):
        check_keys(servers_of(f"{KEYED}, {PLAIN}"), has_keys=has_keys)
    check_keys(servers_of(f"{PLAIN}, {PLAIN.replace('south', 'east')}"), has_keys=False)
