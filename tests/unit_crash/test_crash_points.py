"""A process may die between any two effects: every effect has crash points, and a part is tried
here.

`all_crash_points.py` tries all of them; docs/FAULTS.md says what is promised.
"""

import errno

import crash_run
import pytest
from crash_point import IN_MEMORY, OF_GROUPS, Point, carried_out
from defects import defect, double_weights

from fsl_async.files.memory_files import Faults, MemoryFiles
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.observe.ledger_audit import acknowledged_keys
from fsl_async.roles.sync import effects as do
from fsl_async.store.recovery import recovery
from fsl_async.store.recovery.run_directory import RunDirectory

STRIDE = {"clock": 41, "rounds": 31, "rough": 53, "buffer": 53, "latest": 67}
CALL_STRIDE = {"clock": 97, "rounds": 71}
OF_SUMS = {do.KeepSum.tag, do.OpenSum.tag}
HAS_SUMS = "secure" in crash_run.KINDS  # its extra is installed
if HAS_SUMS:
    STRIDE["secure"], CALL_STRIDE["secure"] = 53, 89


@pytest.fixture(scope="module")
def points():
    """Return the points of all kinds of runs: kind -> points."""
    return {kind: crash_run.passed(kind).points.all() for kind in STRIDE}


@pytest.mark.parametrize("shell", [ParameterServerShell, ClientShell])
def test_every_effect_of_a_role_has_crash_points(points, shell):
    """A run passes a point before and after each effect; a new effect without one fails here."""
    wanted, role = carried_out(shell), "client" if shell is ClientShell else "ps"
    assert len(wanted) > 10
    for stage in ("before", "after"):
        passed = {
            p.name for kind in points.values() for p in kind if (p.role, p.stage) == (role, stage)
        }
        # test_group_crash_points.py, and storms
        elsewhere = OF_GROUPS | IN_MEMORY[role] | (set() if HAS_SUMS else OF_SUMS)
        assert wanted - passed - elsewhere == set()


@pytest.mark.parametrize("kind", STRIDE)
def test_a_run_goes_on_from_any_point(points, kind):
    """Killed at any effect, by a signal or a power cut: no delta is lost or doubled, no version
    differs.
    """
    of_sums = [one for one in points[kind] if one.name in OF_SUMS and one.nth == 2]
    chosen = [*points[kind][:: STRIDE[kind]], *of_sums]
    assert len(chosen) > 8
    for number, point in enumerate(chosen):
        power = crash_run.POWERS[number % 5] if point.role == "ps" else None
        assert crash_run.play(kind, point=point, power=power).found == [], (point, power)


@pytest.mark.parametrize("kind", CALL_STRIDE)
@pytest.mark.parametrize(
    ("mode", "power", "options"),
    [
        ("after", None, {}),
        ("after", "all", {}),
        ("after", 1, {}),
        ("torn", "names", {}),
        ("error", None, {"failures": 1}),
        ("error", None, {"failures": 6, "number": errno.EIO}),
        ("error", None, {"failures": 2, "number": errno.EIO, "reads": True}),
        ("error", "all", {"die_after": 3}),
    ],
)
def test_a_run_goes_on_from_any_call_to_the_disk(kind, mode, power, options):
    """A killed process, a power cut and a full disk cost no delta and change no version, in memory
    and from disk to disk.
    """
    reads = options.get("reads", False)
    calls = len(crash_run.passed(kind, faults=[Faults(reads=reads)]).faults[0].calls)
    begin = 1 + len(f"{mode} {power} {options}")  # other calls in each mode
    for at in range(begin, calls, CALL_STRIDE[kind] * (3 if reads else 1)):
        faults = Faults(at, mode, **options)
        assert crash_run.play(kind, faults=[faults], power=power).found == [], at


@pytest.mark.parametrize("power", ["all", 2])
def test_a_start_after_a_crash_may_be_killed_too(power):
    """The next start begins over."""
    calls = len(crash_run.passed("clock").faults[0].calls)
    for number, at in enumerate(range(3, calls * 2 // 3, 29)):
        faults = Faults(at), Faults(1 + number * 2 % 19)
        run = crash_run.play("clock", faults=faults, power=power)
        assert run.found == [], (at, faults[1].at)


def test_a_run_goes_on_from_any_call_of_any_thread():
    """Two threads sync a version's files by default: a kill in one interrupts the other."""
    by_others = crash_run.passed("rounds", faults=[Faults(order=0)], threads=2).faults[0].by_others
    places = [at for at, one in enumerate(by_others, start=1) if one]
    hit = 0
    for number, at in enumerate(places):
        faults, power = Faults(at, "after", order=at), crash_run.POWERS[number % 5]
        run = crash_run.play("rounds", faults=[faults], power=power, threads=2)
        assert run.found == [], (at, power)
        hit += faults.by_others[-1]
    assert hit > 0


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
        run = crash_run.play("clock", point=point, wall=JUMPS[jump])
        assert run.found == []
        assert run.scheduler.time() < 180.0


COMMIT_KILLED = Point("ps", "commit", "after", 3)
DEFECTS = [
    (defect(MemoryFiles, "sync")(lambda *_: None), COMMIT_KILLED, "all"),
    (
        defect(recovery, "make_durable_folder")(lambda _, files, path: files.make_directory(path)),
        COMMIT_KILLED,
        "all",
    ),
    (
        defect(RunDirectory, "record")(
            lambda _, self, fact, members: self.book.apply({**members, "fact": fact, "at": 1.0})
        ),
        Point("ps", "commit", "before", 2),
        None,
    ),
    (double_weights, Point("ps", "commit", "after", 2), None),
]


@pytest.mark.parametrize(("inject", "point", "power"), DEFECTS)
def test_the_checks_can_fail(monkeypatch, inject, point, power):
    """A defect in the store or its disk is found."""
    inject(monkeypatch)
    found = crash_run.play("clock", point=point, power=power).found
    assert [one for one in found if "was not reached" not in one]


def test_a_run_is_audited_by_its_own_journals():
    """The journals of the parameter server and of all clients are enough for the audit, through a
    crash.
    """
    with crash_run.folder() as root:
        run = crash_run.CrashRun("clock", root, point=Point("ps", "commit", "after", 2)).run()
        assert run.found == []
        server, *clients = (set(acknowledged_keys(path)) for path in run.journals)
        assert len(clients) == 5
        made = [one for journals in run.journals.values() for one in journals]
        assert server | set().union(*clients) == {key for one in made for key in one.acknowledged}
        assert len(server) > 6
        assert len(set().union(*clients)) > 6
