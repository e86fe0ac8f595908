"""From journals to a curve, a verdict, a table and rows: arithmetic on what nodes write."""

import json

import attrs

from fsl_async.tools.compare import table
from fsl_async.tools.compare.outcome import ClientCosts, Curve, Outcome, Point, Score, Scored


def begins(number, now=100.0):
    """Make the line of a round's begin."""
    return {"type": "take_snapshot", "round": number, "now": now}


def note(version, now, up, *, waited=0.0, down=0):
    """Make the note of a client that has moved onto a version; None: of its last bytes."""
    found = {
        "type": "traffic",
        "now": now,
        "coded": {"activations up": up, "client model down": down},
        "payload": {"activations up": 2 * up},
        "sockets": {"up": 3 * up},
    }
    return found if version is None else {**found, "version": version, "waited_s": waited}


def scored(at, accuracy, seconds=1.0):
    return Scored(at, seconds, Score(accuracy, 1.0))


def curve(turns=1, scores=None, **clients):
    """Make the curve of clients, each with the lines of its journal."""
    found = Curve(turns, {name: ClientCosts() for name in clients}, scores or {})
    for name, lines in clients.items():
        for line in lines:
            found.clients[name].apply(line)
    return found


def rounds(*notes):
    """Put the begin of a round in front of each note but the first, as a client writes them."""
    found = []
    for number, one in enumerate(notes):
        found += [one] if number == 0 else [begins(number - 1), one]
    return found


def test_the_clock_stands_still_while_a_version_is_scored():
    """Scoring is not part of the method: neither its seconds nor waiting for it count."""
    lines = rounds(note(0, 99.0, 1), note(1, 106.5, 10, waited=3.0), note(2, 112.5, 20, waited=5.5))
    scores = {1: scored(104.0, 0.3, seconds=2.0), 2: scored(110.0, 0.4, seconds=2.0)}
    _, first, second = [None, *curve(scores=scores, a=lines, b=lines).points()]
    assert (first.seconds, second.seconds) == (4.0, 8.0)
    assert (first.waited, first.trained) == (2.0, 9.0)
    assert (second.waited, second.trained) == (3.0, 17.0)


def test_bytes_are_all_clients_newest_counters():
    """A client without a note of a version, as where clients take turns, counts with its last one,
    once; a turn's costs end when the client has fetched what its next turn begins with.
    """
    found = curve(
        turns=2,
        scores={2: scored(102.0, 0.2), 4: scored(104.0, 0.5)},
        a=[note(0, 99, 0), begins(0), note(2, 102.5, 10, down=1), begins(2), note(4, 105, 30)],
        b=[note(0, 99, 0), note(1, 101, 0), begins(1), note(3, 103, 20, down=2), begins(3),
           note(4, 105, 50, down=4)],
    )  # fmt: skip
    first, second = found.points()
    assert (first.round, first.bytes) == (1, 33)
    assert (second.round, second.bytes) == (2, 84)
    assert second.payload == {"activations up": 160}
    assert second.sockets == {"up": 240}


def test_bytes_after_the_last_version_count_too():
    """A goodbye, or the measure of a site, comes after the last note with a version."""
    lines = [*rounds(note(0, 99, 0), note(1, 101, 10)), note(None, 101.5, 11)]
    found = curve(a=[*lines, {"type": "node_ended"}, note(None, 102, 12)])
    assert found.points()[-1].bytes == 12
    assert curve(a=lines).points()[-1].bytes == 10, "in the middle of a run it is the next round"


def test_a_round_is_complete_when_all_clients_hold_its_version():
    """A version is scored before clients fetch it, and its line had the bytes without that."""
    base, one = note(0, 99, 0), note(1, 101, 10)
    assert not curve(a=rounds(base, one), b=rounds(base)).is_complete(1)
    assert curve(a=rounds(base, one), b=rounds(base, one)).is_complete(1)
    late = [base, begins(0), begins(1), note(2, 104, 20)]  # it missed version 1
    found = curve(a=rounds(base, one), b=late)
    assert found.is_complete(1)
    assert not found.is_complete(2)
    turn = [base, begins(1), note(2, 103, 10)]
    assert not curve(turns=2, a=[base], b=turn).is_complete(2)
    assert curve(turns=2, a=rounds(base, one), b=turn).is_complete(2)


def test_bytes_of_a_round_are_those_after_the_first_version():
    """The base version's upload and download are no round."""
    lines = rounds(note(0, 99, 100), note(1, 101, 110), note(2, 102, 120))
    found = curve(a=lines).sites()["a"]
    assert found["coded"] == {"activations up": 10.0, "client model down": 0.0}
    assert found["sockets"] == {"up": 30.0}


def point(number, accuracy, size=1000, loss=0.5):
    sent = {"up": size}
    return Point(number, accuracy, loss, 2.0 * number, {"activations up": size}, sent, sent, 0.5, 2)


def traffic(up):
    return {
        "payload": {"adapters up": 2.0 * up, "adapters down": 8.0},
        "coded": {"adapters up": float(up), "adapters down": 4.0},
        "sockets": {"up": 3.0 * up, "down": 5.0},
    }


def outcome(method, *points, **more):
    """Make an outcome of (accuracy, bytes) at the ends of its rounds."""
    sites = {"client-1": traffic(1000), "client-2": traffic(3000)}
    given = {"sites": sites, "memory": 60_000_000, "target": 0.5, **more}
    made = tuple(point(number, *one) for number, one in enumerate(points, 1))
    return Outcome(method=method, points=made, **given)


def alone(method, accuracy, **more):
    end = Point(2, accuracy, 0.5, 2.0)
    return attrs.evolve(outcome(method, sites={}, memory=None, **more), points=(end,))


def test_the_target_counts_from_the_first_round_that_is_there():
    """Later rounds may fall below the target; a round exactly at it has reached it."""
    found = outcome("sl", (0.4, 1), (0.5, 2), (0.45, 3), (0.6, 4))
    assert found.reached.round == 2
    assert found.best == 0.6
    assert outcome("sl", (0.4, 1), (0.499, 2)).reached is None
    assert outcome("sl").best is None
    losses = tuple(point(number, None, loss=loss) for number, loss in ((1, 3.0), (2, 2.5)))
    found = attrs.evolve(outcome("fedit", by_loss=True, target=2.5), points=losses)
    assert found.reached is losses[1], "a loss is reached from above"


def cells(found, method):
    """Return the words of a method's line in each of the two tables."""
    return [line.split()[1:] for line in found if line.startswith(f"{method} ")]


def test_the_table_has_bytes_against_the_least():
    """The best has 1; a method that misses the target has no bytes to it."""
    found = table.lines(
        [
            outcome("sl", sites={}),
            outcome("fsl-sage", (0.3, 1_000_000), (0.55, 2_000_000)),
            outcome("splitfed-v1", (0.6, 9_000_000)),
            outcome("fedavg", (0.4, 5_000_000)),
        ]
    )
    up, down = ["2.0", "kB"], ["0.0", "kB"]
    scores, costs = cells(found, "fsl-sage")
    assert scores == ["55.0%", "55.0%", "0.500", *up, *down, "60"]
    assert costs == ["2", "2.00", "1.00x", "4.0", "4.0", "25%"]
    assert cells(found, "splitfed-v1")[1][1:3] == ["9.00", "4.50x"]
    assert cells(found, "fedavg")[1] == ["-", "-", "-", "-", "2.0", "25%"]


def test_the_table_has_means_over_seeds_and_over_sites():
    """Accuracies of 0.5 and 0.7 are 60 % with a deviation of sqrt(2 x 0.01) = 14.1 %."""
    found = table.lines(
        [
            outcome("bank", (0.4,), (0.5,), ranks=(2, 4), target=0.6),
            alone("local", 0.6, parts=((0.5, 0.6), (0.7, 0.4)), ranks=(4, 4), target=0.6),
            outcome("bank", (0.65,), (0.7,), ranks=(2, 4), seed=1, target=0.6),
        ]
    )
    bank, costs = cells(found, "bank")
    assert bank[:4] == ["2-4", "60.0±14.1%", "60.0%", "0.500±0.000"]
    assert costs == ["1", "0.00", "1.00x", "2.0", "1", "of", "2", "4.0", "25%"]
    assert cells(found, "local")[0][:4] == ["4", "60.0±14.1%", "60.0%", "0.500±0.141"]
    text = "\n".join(found)
    assert "±: standard deviation over seeds\nlocal: mean and standard deviation over" in text
    assert "bank: adapters down 0.0 kB / 0.0 kB, adapters up 4.0 kB / 2.0 kB,\n" in text


def test_a_row_has_everything():
    """Programs read rows, so a row has all figures."""
    found = outcome("fsl-sage", (0.3, 10), (0.55, 20), ranks=(2, 4)).row({"seed": 3})
    found = json.loads(json.dumps(found))
    assert found["choices"] == {"seed": 3}
    assert (found["accuracy"], found["loss"], found["rounds"]) == (0.55, 0.5, 2)
    assert (found["reached"]["round"], found["best_accuracy"]) == (2, 0.55)
    assert [p["bytes"] for p in found["points"]] == [10, 20]
    assert found["points"][0]["idle_share"] == 0.25
    assert found["site_round_bytes"]["coded"] == {"adapters up": 2000.0, "adapters down": 4.0}
    assert found["sites"]["client-2"]["payload"]["adapters up"] == 6000.0
    assert found["ranks"] == [2, 4]
