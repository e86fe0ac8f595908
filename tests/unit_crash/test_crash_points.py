"""A process may die between any two effects: every effect has crash points, and a part is tried
here.

`all_crash_points.py` tries all of them; docs/FAULTS.md says what is promised.
"""

import inspect
import re

import crash_kinds
import crash_split
import pytest
from crash_disk import CrashDisk
from crash_journal import CrashJournal, ProcessRecords
from crash_point import Point
from crash_world import NOON

from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.client.split_shell import SplitClientShell
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.nodes.split_server.shell import SplitServerShell
from fsl_async.observe import journal
from fsl_async.observe.ledger_audit import JOURNAL, acknowledged_keys
from fsl_async.roles import machine
from fsl_async.roles.machine import Effect
from fsl_async.roles.split import effects as effects_split
from fsl_async.roles.sync import effects
from fsl_async.store import recovery, vectors
from fsl_async.store.facts import Facts
from fsl_async.store.files import Files

SHELLS = {
    "ps": (ParameterServerShell,),
    "client": (ClientShell, SplitClientShell),
    "split": (SplitServerShell,),
}
STRIDE = {"clock": 41, "rounds": 67, "rough": 59, "buffer": 61, "latest": 89}
SPLIT_STRIDE = {"sl": 919, "splitfed-v1": 2017, "u-shape": 2591, "fsl-sage": 1223, "lockstep": 487}
CALL_STRIDE = 37


@pytest.fixture(scope="module")
def points():
    """Return the points of all kinds of runs: kind -> points."""
    found = {kind: crash_kinds.passed(kind)[0] for kind in STRIDE}
    return found | {kind: crash_split.passed(kind) for kind in crash_split.KINDS}


def carried_out(shells):
    """Return the tags of the effects that these shells carry out, by the tables in their source."""
    tables = " ".join(inspect.getsource(shell.__init__) for shell in shells)
    names = set(re.findall(r"\b([A-Z]\w+):", tables))
    effects_of = (machine, effects, effects_split)
    classes = (getattr(module, name, None) for module in effects_of for name in names)
    return {one.tag for one in classes if isinstance(one, type) and issubclass(one, Effect)}


@pytest.mark.parametrize("role", SHELLS)
def test_every_effect_of_a_role_has_crash_points(points, role):
    """A run passes a point before and after each effect; a new effect without one fails here."""
    wanted = carried_out(SHELLS[role])
    assert len(wanted) > 10
    for stage in ("before", "after"):
        passed = {
            p.name for kind in points.values() for p in kind if (p.role, p.stage) == (role, stage)
        }
        assert wanted - passed == set()


def test_no_effect_is_outside_the_tables():
    """`carried_out` finds the tables by their text; an effect listed in another way fails here."""
    known = set().union(*(carried_out(shells) for shells in SHELLS.values()))
    classes = {
        found.tag
        for module in (machine, effects, effects_split)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Effect) and found is not Effect
    }
    assert classes == known


@pytest.mark.parametrize("kind", STRIDE)
def test_a_run_goes_on_from_any_point(points, kind):
    """Killed at any effect, by a signal or a power cut: no delta is lost or doubled, no version
    differs.
    """
    chosen = points[kind][:: STRIDE[kind]]
    assert len(chosen) > 8
    for number, point in enumerate(chosen):
        powers = crash_kinds.POWERS if point.role == "ps" else (None,)
        power = powers[number % len(powers)]
        assert crash_kinds.attempt(kind, point, power) == [], (point, power)


@pytest.mark.parametrize("kind", SPLIT_STRIDE)
def test_split_learning_goes_on_from_any_point(points, kind):
    """The same for split learning, whose split servers and clients have effects of their own."""
    for point in points[kind][SPLIT_STRIDE[kind] // 2 :: SPLIT_STRIDE[kind]]:
        assert crash_split.attempt(kind, point) == [], point


@pytest.mark.parametrize(
    ("mode", "power", "options"),
    [
        ("after", "all", {}),
        ("after", 1, {}),
        ("error", None, {"failures": 6}),
        ("error", None, {"failures": 2, "number": 5, "reads": True}),
    ],
)
def test_a_run_goes_on_from_any_call_to_the_disk(mode, power, options):
    """Clients, shells and machines survive the store's death and errors; the store has its own
    tests.
    """
    calls = len(
        crash_kinds.calls_with_reads("clock")
        if "reads" in options
        else crash_kinds.passed("clock")[1]
    )
    for at in range(1 + len(options), calls, CALL_STRIDE * (3 if "reads" in options else 1)):
        assert crash_kinds.attempt_call("clock", at, mode, power, **options) == [], at


def test_a_run_goes_on_from_any_call_of_any_thread():
    """Two threads write versions by default: a kill in one interrupts the other in the middle of a
    call.
    """
    places = [at for at, one in enumerate(crash_kinds.calls_of_threads("rounds"), start=1) if one]
    assert len(places) > 40
    hit = cut_short = 0
    for number, at in enumerate(places[::2]):
        mode, power = ("torn", "after")[number % 2], crash_kinds.POWERS[number % 5]
        found, disk = crash_kinds.attempt_call_of_threads("rounds", at, mode, power, order=at)
        assert found == [], (at, mode, power)
        hit += disk.by_others[-1]
        cut_short += disk.cut_short
    assert hit > len(places) // 8
    assert cut_short > 0


HOUR_S, DAY_S = 3600.0, 86400.0
JUMPS = {
    "back at a restart": lambda _, launch: -HOUR_S * (launch > 1),
    "forward at a restart": lambda _, launch: DAY_S * (launch > 1),
    "back while it runs": lambda now, _: -HOUR_S * (now > 14.0),
    "forward while it runs, and back": lambda now, _: DAY_S * (14.0 < now < 28.0),
    "to where it was": lambda now, launch: -now * (launch > 1),
}


@pytest.mark.parametrize("jump", JUMPS)
def test_clocks_that_jump_cost_nothing(jump):
    """Incarnation numbers and schedules come from wall clocks: a jump must not make two
    incarnations equal, or a run wait for a day.
    """
    for point in (Point("ps", "commit", "job", 2), Point("client", "offer_delta", "after", 4)):
        with crash_kinds.folder() as root:
            world = crash_kinds.make("clock", root, point=point, wall=JUMPS[jump]).run()
            assert world.violations == []
            assert world.scheduler.time() < 150.0
            assert world.now(1) >= NOON - HOUR_S


def _no_effect(*_, **__):
    """Do nothing."""


def _no_sync(monkeypatch):
    monkeypatch.setattr(CrashDisk, "sync", _no_effect)
    return Point("ps", "commit", "after", 3), "all"


def _no_folder_sync(monkeypatch):
    real = recovery.make_durable_folder
    monkeypatch.setattr(
        recovery,
        "make_durable_folder",
        lambda files, path: real(Files(), path) or _made(files, path),
    )
    return Point("ps", "commit", "after", 3), "all"


def _made(files, path):
    files.make_directory(path)


def _acknowledged_too_early(monkeypatch):
    monkeypatch.setattr(
        Facts,
        "record",
        lambda self, fact, members: self.book.apply({**members, "fact": fact, "at": 1.0}),
    )
    return Point("ps", "commit", "before", 2), None


def _other_weights(monkeypatch):
    monkeypatch.setattr(vectors, "apply_change", lambda weights, sent: weights.__iadd__(sent * 2))
    return Point("ps", "commit", "after", 2), None


@pytest.mark.parametrize(
    "defect", [_no_sync, _no_folder_sync, _acknowledged_too_early, _other_weights]
)
def test_the_checks_can_fail(monkeypatch, defect):
    """A defect in the store or its disk is found."""
    point, power = defect(monkeypatch)
    assert crash_kinds.attempt("clock", point, power)


def _lines_vanish(monkeypatch):
    monkeypatch.setattr(CrashJournal, "_put", lambda _, data: len(data))


def _numbers_begin_anew(monkeypatch):
    monkeypatch.setattr(journal, "_resume", lambda _: (0, False))


def _acknowledgements_unrecorded(monkeypatch):
    monkeypatch.setattr(
        ProcessRecords, "acknowledges", lambda self, name, *_: self.records[name][-1]
    )


@pytest.mark.parametrize(
    ("defect", "complaint"),
    [
        (_lines_vanish, "journal does not say that"),
        (_numbers_begin_anew, "numbers of ps's journal do not rise"),
        (_acknowledgements_unrecorded, "which no process said"),
    ],
)
def test_journals_are_read(monkeypatch, defect, complaint):
    """Journals are compared with what happened: a false or a missing line is found."""
    defect(monkeypatch)
    found = crash_kinds.attempt("clock", Point("ps", "commit", "after", 2))
    assert any(complaint in one for one in found), found


def test_a_run_is_audited_by_its_own_journals():
    """The journals of the parameter server and of all clients are enough for the audit, through a
    crash.
    """
    with crash_kinds.folder() as root:
        world = crash_kinds.make("clock", root, point=Point("ps", "commit", "after", 2)).run()
        assert world.violations == []
        server, *clients = (
            set(acknowledged_keys(path))
            for path in [
                world.run_dir / JOURNAL,
                *sorted(world.run_dir.glob(f"clients/*/{JOURNAL}")),
            ]
        )
        assert len(clients) == 5
        assert server | set().union(*clients) == set(world.observed.acknowledged)
        assert len(server) > 6
        assert len(set().union(*clients)) > 6
