"""From reports to a curve, a verdict and a table: arithmetic on the nodes' reports."""

import pytest

from fsl_async.errors import UsageError
from fsl_async.tools.compare import table
from fsl_async.tools.compare.choices import Choices, parse_methods
from fsl_async.tools.compare.outcome import HEAD, Gathered, Outcome, Point, cells, row


def report_of(client, version, at, up, *, waited=0.0, trained=1.0, down=0):
    """Make a client's report."""
    return {
        "event": "round",
        "client": client,
        "version": version,
        "at": at,
        "holds": True,
        "coded": {"activations up": up, "client model down": down},
        "payload": {"activations up": 2 * up},
        "sockets": {"up": 3 * up},
        "waited": waited,
        "trained": trained,
    }


def scored(version, at, accuracy, seconds=1.0):
    """Make a score."""
    return {
        "event": "scored",
        "version": version,
        "at": at,
        "seconds": seconds,
        "accuracy": accuracy,
        "loss": 1.0,
        "samples": 10,
    }


def gathered(*records, turns=1):
    found = Gathered(turns)
    for name in ("a", "b"):
        found.take({"event": "began", "client": name, "at": 100.0})
    for record in records:
        assert found.take(record)
    return found


def test_the_clock_stands_still_while_a_version_is_scored():
    """Scoring is not part of the method: neither its seconds nor waiting for it count."""
    found = gathered(
        scored(1, 104.0, 0.3, seconds=2.0),
        report_of("a", 1, 106.5, 10, waited=3.0, trained=6.5),
        report_of("b", 1, 106.5, 10, waited=3.0, trained=6.5),
        scored(2, 110.0, 0.4, seconds=2.0),
        report_of("a", 2, 112.5, 20, waited=5.5, trained=12.5),
        report_of("b", 2, 112.5, 20, waited=5.5, trained=12.5),
    )
    first, second = found.points()
    assert (first.seconds, second.seconds) == (4.0, 8.0)
    assert (first.waited, first.trained) == (2.0, 9.0)
    assert (second.waited, second.trained) == (3.0, 17.0)


def test_bytes_are_all_clients_newest_counters():
    """A client without a report of a version, as where clients take turns, counts with its last
    one, once.
    """
    found = gathered(
        report_of("a", 1, 101.0, 10, down=1),
        report_of("b", 2, 102.0, 20, down=2),
        scored(2, 102.0, 0.2),
        report_of("a", 3, 103.0, 30, down=3),
        report_of("b", 4, 104.0, 50, down=4),
        scored(4, 104.0, 0.5),
        turns=2,
    )
    first, second = found.points()
    assert (first.round, first.bytes) == (1, 33)
    assert (second.round, second.bytes) == (2, 87)
    assert second.payload == {"activations up": 160}
    assert second.sockets == {"up": 240}


def test_a_later_report_of_the_same_version_takes_the_earliers_place():
    """It includes bytes fetched at the round's end."""
    found = gathered(report_of("a", 1, 101.0, 10), report_of("a", 1, 102.0, 10, down=5))
    assert found.points()[0].bytes == 15


def test_other_reports_are_ignored():
    """Reports of unknown kinds are for the caller."""
    assert not Gathered().take({"event": "listening"})


def point(number, accuracy, size):
    return Point(number, accuracy, 1.0, 2.0 * number, {"activations up": size}, {}, {}, 0.5, 2.0)


def outcome(method, *curve, target=0.5):
    return Outcome(method, tuple(point(n + 1, a, s) for n, (a, s) in enumerate(curve)), target)


def test_the_target_counts_from_the_first_round_that_is_there():
    """Later rounds may fall below the target; a round exactly at it has reached it."""
    found = outcome("sl", (0.4, 1), (0.5, 2), (0.45, 3), (0.6, 4))
    assert found.reached.round == 2
    assert found.best == 0.6
    assert outcome("sl", (0.4, 1), (0.499, 2)).reached is None
    assert outcome("sl").best is None


def test_the_table_has_bytes_against_the_least():
    """The best has 1; a method that misses the target has no bytes to it."""
    rows = cells(
        [
            outcome("fsl-sage", (0.3, 1_000_000), (0.55, 2_000_000)),
            outcome("splitfed-v1", (0.6, 9_000_000)),
            outcome("fedavg", (0.4, 5_000_000)),
        ]
    )
    assert all(len(each) == len(HEAD) for each in rows)
    assert rows[0] == ("fsl-sage", "2", "2.00", "1.00x", "4.0", "55.0%", "1.000", "25%")
    assert rows[1][2:4] == ("9.00", "4.50x")
    assert rows[2][:6] == ("fedavg", "-", "-", "-", "-", "40.0%")


@pytest.mark.parametrize("drawn", [True, False])
def test_the_table_fits_80_columns_with_rich_and_without(drawn, monkeypatch):
    """Terminals, mails and logs have 80 columns."""
    if not drawn:
        monkeypatch.setattr(table, "_drawn", lambda _: [])
    names = ("sl", "splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage", "fedavg")
    found = table.lines([outcome(name, (0.987654, 123_456_789_012)) for name in names])
    assert max(map(len, found)) <= 80
    assert [line.split()[0] for line in found[1:7]] == list(names)
    assert "activations up 123,456.789" in "\n".join(found)


def test_a_row_has_everything():
    """Programs read rows, so a row has all figures."""
    found = row(outcome("fsl-sage", (0.3, 10), (0.55, 20)), {"seed": 3})
    assert found["reached"]["round"] == 2
    assert found["choices"] == {"seed": 3}
    assert [p["bytes"] for p in found["points"]] == [10, 20]
    assert found["points"][0]["idle_share"] == 0.25


def test_methods_are_read_in_order_each_once():
    """A method twice would train for nothing."""
    assert parse_methods(" fsl-sage,SL,,sl") == ("fsl-sage", "sl")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": "sl,splitfed"}, "'splitfed' is unknown; known: sl, splitfed-v1"),
        ({"methods": ","}, "name at least one of sl"),
        ({"target": 0.0}, "--target-accuracy 0: a share"),
        ({"target": 1.5}, "above 0 and at most 1"),
        ({"target": float("nan")}, "above 0 and at most 1"),
        ({"model": "vgg"}, "'vgg' is unknown; known: small-cnn, resnet18"),
        ({"learning_rate": 0.0}, "--learning-rate 0"),
    ],
)
def test_bad_choices_are_one_line(given, words):
    """They are found before training, and the line has the valid values."""
    more = {"data": "x", "methods": "sl", **given}
    with pytest.raises(UsageError, match=words) as caught:
        Choices(**{**more, "methods": parse_methods(more["methods"])})
    assert "\n" not in caught.value.message


def test_a_sequential_round_is_a_turn_of_every_client():
    """Rounds of all methods hold the same amount of training."""
    choices = Choices(methods=("sl",), data="x", clients=3, rounds=4)
    assert (choices.versions("sl"), choices.versions("fedavg")) == (12, 4)


def test_choices_survive_json():
    """Nodes that are processes receive them as text."""
    import json

    choices = Choices(methods=("sl", "fedavg"), data="x", seed=7)
    assert Choices.from_dict(json.loads(json.dumps(choices.as_dict()))) == choices


def test_a_round_is_complete_when_all_clients_hold_its_version():
    """A version is scored before clients fetch it, and its line had the bytes without that."""
    found = gathered(scored(1, 102.0, 0.2), report_of("a", 1, 103.0, 10, down=5))
    assert not found.is_complete(1, ("a", "b"))
    found.take(report_of("b", 1, 102.0, 10) | {"holds": False})
    assert not found.is_complete(1, ("a", "b"))
    found.take(report_of("b", 2, 104.0, 20, down=9))  # it came late and missed version 1
    assert found.is_complete(1, ("a", "b"))
    assert not found.is_complete(2, ("a", "b"))
    assert found.is_complete(2, ())
    taking_turns = gathered(report_of("a", 1, 103.0, 10), turns=2)
    assert not taking_turns.is_complete(2, ("a", "b"))
    taking_turns.take(report_of("b", 2, 103.0, 10))
    assert taking_turns.is_complete(2, ("a", "b"))
