"""What the control room decides: requests, snapshots, what a page still lacks."""

import json

import pytest
from facts import call_of
from run_journals import JournalFile

from fsl_async.errors import RunDirError
from fsl_async.observe import segments
from fsl_async.observe.history import Course, plain
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.node_folders import find_nodes
from fsl_async.tools.control_room import snapshot
from fsl_async.tools.control_room.server import HEADERS, Cursor, Gate
from fsl_async.tools.control_room.snapshot import watch


def snapshots(nodes, now=1_790_000_100.0):
    return [snapshot.node(at, node, now) for at, node in enumerate(nodes)]


@pytest.fixture
def journal(tmp_path):
    made = JournalFile(tmp_path / "run")
    made.join(1.0, "a", "b", "c")
    made.round(10.0, 0, {"a": 5.0, "b": 4.0}, missing=["c"])
    made.round(20.0, 1, {"a": 4.0, "c": 3.0}, missing=["b"])
    return made


# --- requests ---


@pytest.mark.parametrize(
    ("method", "host", "path", "token", "cookie", "status"),
    [
        ("GET", "127.0.0.1:9", "/", "t", None, 303),
        ("GET", "localhost:9", "/", "t", None, 303),
        ("GET", "127.0.0.1:9", "/", None, "t", 200),
        ("GET", "127.0.0.1:9", "/events", None, "t", 200),
        ("GET", "127.0.0.1:9", "/", None, None, 403),
        ("GET", "127.0.0.1:9", "/", "wrong", "t", 403),
        ("GET", "127.0.0.1:9", "/events", "t", None, 403),
        ("GET", "127.0.0.1:9", "/", None, "té", 403),
        ("GET", "evil.example:9", "/", "t", "t", 421),
        ("GET", "127.0.0.1:8", "/", None, "t", 421),
        ("GET", "", "/", None, "t", 421),
        ("POST", "127.0.0.1:9", "/", None, "t", 405),
        ("HEAD", "127.0.0.1:9", "/", None, "t", 405),
    ],
)
def test_which_requests_are_answered(method, host, path, token, cookie, status):  # noqa: PLR0917
    assert Gate(9, "t").judge(method, host, path, token, cookie).status == status


def test_tokens_are_random_and_not_shown():
    assert Gate(9).token != Gate(9).token
    assert len(Gate(9).token) >= 32
    assert Gate(9, "secret").cookie == "fsl-control-room-9"
    assert "secret" not in repr(Gate(9, "secret"))
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


# --- snapshots ---


def test_a_snapshot_has_the_round_the_sites_and_the_late(journal):
    journal.fact(30.0, call_of(2, ["a"], 30.0, late=("b",)))
    journal.client(31.0, "c", "gone", why="expired")
    journal.client(32.0, "b", "training", 1, key="b/1/2/3", outcome="held", why="too far")
    (found,) = snapshots(watch(journal.path.parent))
    rows = {one["name"]: one for one in found["sites"]}
    assert {name: one["state"] for name, one in rows.items()} == {
        "a": "training",
        "b": "late",
        "c": "gone",
    }
    assert rows["a"]["merged"] == 2
    assert rows["a"]["coded"] == 2 * 1234
    assert rows["a"]["raw"] == 2 * 4000
    assert (rows["a"]["here"], rows["c"]["here"], rows["b"]["version"]) == (True, False, 1)
    assert found["window"]["waited_for"] == ("a",)
    assert found["window"]["late"] == ("b",)
    assert found["held"] == [["b/1/2/3", "too far"]]
    assert found["version"] == 2
    assert found["tokens"] == 400
    json.dumps(found, allow_nan=False)


def test_the_audits_verdict():
    assert snapshot.audit_words({}) is None
    counts = {"merged": 3, "pending": 0, "quarantined": 1, "lost": (), "doubled": ()}
    found = snapshot.audit_words({**counts, "problems": (), "complaints": [], "clean": True})
    assert found["clean"]
    assert found["words"] == "clean: 3 merged, 0 pending, 1 quarantined, 0 lost, 0 doubled"
    assert found["counts"] == {**counts, "lost": 0, "doubled": 0}
    found = snapshot.audit_words({"problems": ["the ledger cannot be read: x"]})
    assert (found["clean"], found["complaints"]) == (False, ["the ledger cannot be read: x"])


def test_a_large_ledger_is_not_audited_here(journal):
    with (journal.path.parent / "ledger.jsonl").open("wb") as file:
        file.truncate(200_000_000)
    (node,) = watch(journal.path.parent)
    audit, _ = node.look()
    assert "200.0 MB" in snapshot.audit_words(audit)["words"]


def test_a_long_segment_is_read_in_turns(tmp_path):
    """The address of the page does not wait for it."""
    journal = JournalFile(tmp_path / "run")
    journal.join(1.0, "a")
    for number in range(600):
        journal.round(3.0 * number, number, {"a": 1.0})
    (node,) = watch(tmp_path / "run")
    assert 0 < node.state.ps.version < 600
    assert node.is_loading
    node.read_all()
    assert (node.state.ps.version, node.is_loading) == (600, False)


def test_many_sites_of_a_hostile_network_are_bounded(tmp_path):
    journal = JournalFile(tmp_path / "run")
    journal.join(1.0, *(f"p{at}" for at in range(500)))
    (found,) = snapshots(watch(tmp_path / "run"))
    assert (len(found["sites"]), found["hidden"]) == (snapshot.MAX_SITES, 100)


# --- folders, segments ---


def test_folders_without_a_journal_are_refused(tmp_path):
    with pytest.raises(RunDirError, match="no journal"):
        find_nodes(tmp_path)
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(RunDirError, match="no line yet"):
        watch(tmp_path)


def test_the_course_of_older_segments_is_in_the_newest(journal):
    total = segments.Total(Course())
    total.add(JournalReader(journal.path).read())
    line = {"n": journal.n, "t": journal.begin + 25, "type": "so_far", "kind": "note"}
    first = json.dumps({**line, **total.as_fields()}).encode() + b"\n"
    segments.os.close(segments.turn(journal.path, first, ()))
    journal.n += 1
    journal.round(30.0, 2, {"a": 3.0, "b": 2.0})
    (node,) = watch(journal.path.parent)
    assert not node.is_loading
    assert node.history.rounds.rounds() == [0, 1, 2]
    assert plain(node.history.rounds.clients["b"]["loss"]) == [4.0, None, 2.0]
    assert node.state.ps.version == 3
    assert node.state.clients["a"].deltas_merged == 3
    assert node.history.timelines["c"].segments()[0][0] == journal.begin + 1


# --- what a page lacks ---


class Page:
    """Applies messages as room.js does."""

    def __init__(self):
        self.rounds, self.clients, self.timelines, self.sizes = [], {}, {}, []

    def take(self, parts):
        """Apply them."""
        for part in parts:
            self.sizes.append(len(json.dumps(part)))
            if "rounds" in part:
                self.rounds[part["rounds"]["begin"] :] = part["rounds"]["rounds"]
            for name, columns in part.get("clients", {}).items():
                column = self.clients.setdefault(name, [])
                column += [None] * (part["begin"] - len(column))
                column[part["begin"] :] = columns["loss"]
            for name in part.get("dropped", ()):
                del self.timelines[name]
            for name, line in part.get("timelines", {}).items():
                mine = self.timelines.setdefault(name, [])
                mine[line["begin"] :] = list(zip(line["t"], line["states"], strict=True))


def test_a_page_that_gets_only_what_is_new_has_all(journal):
    (node,) = watch(journal.path.parent)
    early, cursor = Page(), Cursor(0)
    early.take(cursor.parts(node.history))
    assert list(cursor.parts(node.history)) == []
    for number in range(2, 30):
        losses = {"a": 1.0} if number % 2 else {"a": 1.0, "b": 2.0, "d": 3.0}
        journal.round(10.0 * number + 10, number, losses)
        node.read_all()
        early.take(cursor.parts(node.history))
    late = Page()
    late.take(Cursor(0).parts(node.history))
    assert early.rounds == late.rounds == list(range(30))
    assert early.clients == late.clients
    assert early.timelines == late.timelines
    assert early.clients["b"][:6] == [4.0, None, 2.0, None, 2.0, None]
    assert max(early.sizes[-8:]) < max(late.sizes) / 2


def test_a_page_gets_a_segment_again_that_was_replaced(journal):
    (node,) = watch(journal.path.parent)
    page, cursor, line = Page(), Cursor(0), node.history.timelines["a"]
    for t, state in ((90.0, "sending"), (90.0, "training"), (91.0, "gone"), (91.0, "fetching")):
        line.enter(journal.begin + t, state)
        page.take(cursor.parts(node.history))
        assert page.timelines["a"] == line.segments()


def test_refused_clients_leave_the_timeline_and_give_their_places_back(journal):
    (node,) = watch(journal.path.parent)
    page, cursor = Page(), Cursor(0)
    for number in range(300):
        name = f"x{number}"
        journal.client(30.0, name, "joining", begins=True)
        if number == 0:
            node.read_all()
            page.take(cursor.parts(node.history))
            assert set(page.timelines) == {"a", "b", "c", "x0"}
        if number % 2:
            journal.client(31.0, name, "refused", why="its name is taken")
        else:
            journal.client(31.0, name, "refused")
    journal.client(32.0, "d", "joining", begins=True)
    node.read_all()
    page.take(cursor.parts(node.history))
    assert set(page.timelines) == set(node.history.timelines) == {"a", "b", "c", "d"}
