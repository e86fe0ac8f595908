"""Choices of a comparison of tuning, and its table and rows."""

import json

import attrs
import numpy as np
import pytest

from fsl_async.cli import main
from fsl_async.errors import UsageError
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.tools.compare import table
from fsl_async.tools.compare.outcome import Gathered, Point
from fsl_async.tools.compare.tuning.choices import (
    METHODS,
    ZEROTH,
    TuningChoices,
    is_tuning,
    parse_methods,
    parse_numbers,
    parse_orders,
)
from fsl_async.tools.compare.tuning.outcome import Result, lines, row, traffic_of
from fsl_async.tools.compare.tuning.pictures import draw
from fsl_async.tools.compare.tuning.records import joined

CLASSIFY = ("tune.objective=classify", 'tune.labels="no,yes"')


def choices(*methods, **more):
    given = {"base": "base", "data": ("a", "b"), "methods": methods or ("fedit", "bank"), **more}
    return TuningChoices(**given)


def test_all_rules_have_one_rank_and_train_by_rounds():
    """A bank's default would be larger, and rules that allow the clock would train otherwise."""
    for method in METHODS:
        config = choices().config(method)
        if method != ZEROTH:
            assert (config.tune.rule, config.tune.adapter_rank) == (method, 8)
        assert config.sync.trigger == "rounds"
        assert config.sync.clients == 2


def test_unequal_ranks_are_of_rules_that_allow_them():
    """Others run at the run's rank, which is the largest one unless it is set."""
    found = choices(ranks=(2, 4))
    assert [found.ranks_of(name) for name in ("fedit", "bank", "pooled", "local")] == [
        (4, 4),
        (2, 4),
        (4, 4),
        (4, 4),
    ]
    wider = choices(ranks=(2, 4), sets=("tune.rank=16",))
    assert [wider.ranks_of(name) for name in ("fedit", "bank")] == [(16, 16), (2, 4)]


def test_records_are_held_out_where_none_are_given():
    """With --eval a site trains on all that it has."""
    assert choices().config("fedit").data.holdout > 0
    assert choices(held_out="x").config("fedit").data.holdout == 0
    kept = choices(held_out="x", sets=("data.holdout=0.1",))
    assert kept.config("fedit").data.holdout == 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": (2,)}, "--ranks: 1 ranks, and 2 sites"),
        ({"ranks": (2, 4), "methods": ("fedit", "ffa")}, "none of the methods allows .*, bank do"),
        ({"ranks": (2, 4), "sets": ("tune.rank=3",)}, "between 1 and the run's rank, which is 3"),
        ({"ranks": (0, 4)}, "between 1 and the run's rank, which is 4"),
        ({"orders": ("first",)}, "--orders: 1 orders, and 2 sites"),
        ({"orders": ("first", "zeroth"), "methods": ("fedit", "zeroth")}, "sites of the method"),
        ({"sets": ("tune.rule=ffa",)}, "--set tune.rule: is set by --methods"),
        ({"sets": ("run.seed=1",)}, "is set by --seed or --seeds"),
        ({"stops_at_target": True}, "there is no target"),
        ({"target_accuracy": 0.7}, "this objective has --target-loss instead"),
        ({"target_loss": 0.7, "sets": CLASSIFY}, "this objective has --target-accuracy instead"),
        ({"target_accuracy": 1.5, "sets": CLASSIFY}, "above 0 and at most 1"),
    ],
)
def test_bad_choices_are_one_line(given, words):
    """They are found before training, and the line has what would be right."""
    methods = given.pop("methods", ())
    with pytest.raises(UsageError, match=words) as caught:
        choices(*methods, **given)
    assert "\n" not in caught.value.message


def test_rules_and_methods_of_split_learning_are_not_mixed():
    """They train different models, so their scores say nothing of each other."""
    assert is_tuning("fedit,BANK")
    assert not is_tuning("sl,nothing")
    with pytest.raises(UsageError, match="fedit tunes a base model, and sl trains a model anew"):
        is_tuning("sl,fedit")


def test_names_and_numbers_are_read():
    """A method twice would train for nothing."""
    assert parse_methods(" bank,FFA,,bank") == ("bank", "ffa")
    assert parse_numbers("--ranks", "2,4, 8") == (2, 4, 8)
    assert parse_numbers("--ranks", "") == ()
    with pytest.raises(UsageError, match="'fedid' is unknown; known: fedit, ffa"):
        parse_methods("fedid")
    for text in ("2,x", "-1"):
        with pytest.raises(UsageError, match=r"--ranks .* write numbers like 2,4,8"):
            parse_numbers("--ranks", text)


def test_orders_are_read():
    """A site's order is what its command line would have."""
    assert parse_orders("") == ()
    found = choices(orders=parse_orders("first, Zeroth"))
    assert [found.order_of(site) for site in (0, 1)] == ["first", "zeroth"]
    assert choices().order_of(0) is None
    with pytest.raises(UsageError, match="'second' is no order; known: first, zeroth"):
        parse_orders("first,second")


def test_training_alone_makes_as_many_steps_as_a_site():
    """Zeroth order counts steps of its own, unless rules are compared with it."""
    sets = ("tune.steps=3", "tune.zo_steps=2")
    assert choices("fedit", rounds=5, sets=sets).steps == 15
    assert choices("fedit", "zeroth", rounds=5, sets=sets).steps == 15
    assert choices("zeroth", rounds=5, sets=sets).steps == 10


def test_not_all_versions_need_a_score():
    """The last one has a score whatever the step, and the base has none."""
    found = choices(rounds=7, score_every=3)
    assert [v for v in range(8) if found.is_scored(v)] == [3, 6, 7]


def test_choices_survive_json():
    """The parameter server is a process and receives them as text."""
    found = choices(ranks=(2, 4), sets=("tune.steps=3",))
    assert TuningChoices.from_dict(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "fedit"), "--methods fedit: needs --base"),
        (("--methods", "fedit", "--base", ".", "--cut", "1"), "--cut is of split learning"),
        (("--methods", "fedit", "--base", "."), "--base .: there is no config.json"),
        (("--methods", "sl", "--ranks", "2"), "--ranks needs --base MODEL_DIR"),
        (("--methods", "sl", "--data", "."), "--data: give one"),
        (("--methods", "sl,fedit"), "compare them apart"),
    ],
)
def test_options_of_the_other_kind_are_refused(more, words, tmp_path, monkeypatch, capsys):
    """An option without effect would mislead."""
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--data", ".", *more]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def point(number, accuracy, loss=0.5, size=1000):
    return Point(number, accuracy, loss, 2.0 * number, {"adapters up": size}, {}, {}, 0.5, 2.0)


def traffic(up):
    return {
        "payload": {"adapters up": 2.0 * up, "adapters down": 8.0},
        "coded": {"adapters up": float(up), "adapters down": 4.0},
        "sockets": {"up": 3.0 * up, "down": 5.0},
    }


def result(method="bank", *accuracies, seed=0, **more):
    points = tuple(point(n, a) for n, a in enumerate(accuracies, 1))
    sites = {"client-1": traffic(1000), "client-2": traffic(3000)}
    given = {"ranks": (2, 4), "sites": sites, "memory": 60_000_000, "target": 0.6, **more}
    return Result(method=method, seed=seed, points=points, **given)


def alone(method, accuracy, **more):
    return result(method, accuracy, ranks=(4, 4), sites={}, memory=None, **more)


def test_bytes_of_a_round_are_those_after_the_first_version():
    """The base version's upload and download are no round."""
    found = Gathered()
    for name, first in (("a", 100), ("b", 7)):
        found.take({"event": "began", "client": name, "at": 1.0})
        for version in (0, 1, 2):
            counts = {"adapters up": first + 10 * version}
            kinds = {"coded": counts, "payload": counts, "sockets": {"up": 20 * version}}
            found.take({"event": "round", "client": name, "version": version, **kinds})
    once = {"adapters up": 10.0}
    assert traffic_of(found) == {
        name: {"payload": once, "coded": once, "sockets": {"up": 20.0}} for name in "ab"
    }


def test_the_table_has_means_over_seeds_and_over_sites():
    """Accuracies of 0.5 and 0.7 are 60 % with a deviation of sqrt(2 x 0.01) = 14.1 %."""
    shown = lines(
        [
            result("bank", 0.4, 0.5),
            alone("local", 0.6, parts=((0.5, 0.6), (0.7, 0.4))),
            result("bank", 0.65, 0.7, seed=1),
        ]
    )
    head, bank, local = (line.split() for line in shown[:3])
    assert head == [
        "method", "rank", "accuracy", "loss", "kB", "up", "kB", "down", "seconds", "PS", "MB",
    ]  # fmt: skip
    assert bank == ["bank", "2-4", "60.0±14.1%", "0.500±0.000", "2.0", "0.0", "4.0", "60"]
    assert local == ["local", "4", "60.0±14.1%", "0.500±0.141", "-", "-", "2.0", "-"]
    rest = "\n".join(shown[3:])
    assert "±: standard deviation over seeds\nlocal: mean and standard deviation over" in rest
    assert "bank: target in round 1, after 0.00 MB and 2.0 s (with 1 of 2 seeds)" in rest
    assert "bank: adapters down 0.01 / 0.00, adapters up 4.00 / 2.00, sockets" in rest


def test_without_labels_there_is_no_accuracy():
    """The target is then a loss, from above."""
    points = (point(1, None, 3.0), point(2, None, 2.5), point(3, None, 2.6))
    found = attrs.evolve(result(), points=points, by_loss=True, target=2.5)
    assert found.reached is points[1]
    assert lines([found])[0].split()[:3] == ["method", "rank", "loss"]


@pytest.mark.parametrize("drawn", [True, False])
def test_the_table_fits_80_columns_with_rich_and_without(drawn, monkeypatch):
    """Terminals, mails and logs have 80 columns."""
    if not drawn:
        monkeypatch.setattr(table, "_drawn", lambda _: [])
    big = {"client-1": traffic(9_768_960)}
    found = lines([result("hetlora", 0.123, 0.987, sites=big, seed=seed) for seed in (0, 1)])
    assert max(map(len, found)) <= 80
    assert "9,769.0" in found[1]


def test_a_row_has_everything():
    """Programs read rows, so a row has all figures."""
    found = json.loads(json.dumps(row(result("bank", 0.5, 0.7), {"rounds": 2})))
    assert (found["accuracy"], found["loss"], found["rounds"]) == (0.7, 0.5, 2)
    assert found["reached"]["round"] == 2
    assert found["site_round_bytes"]["coded"] == {"adapters up": 2000.0, "adapters down": 4.0}
    assert found["sites"]["client-2"]["payload"]["adapters up"] == 6000.0
    assert found["ranks"] == [2, 4]
    assert [one["accuracy"] for one in found["points"]] == [0.5, 0.7]


def test_a_picture_is_drawn(tmp_path):
    """Rules as curves, training alone as lines across; of a run of one language model losses."""
    path = tmp_path / "x.png"
    results = [result("bank", 0.5, 0.7), result("bank", 0.5, seed=1), alone("pooled", 0.8)]
    draw(results, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    losses = [attrs.evolve(one, points=(point(1, None),), by_loss=True) for one in results]
    draw(losses, path, "title")


def tokenized(first, labels, *, rows=None, width=1):
    """Sequences of 1, 2, ... tokens, numbered from `first`."""
    lengths = np.arange(1, len(labels) * width + 1)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(first, first + starts[-1], dtype=np.int32)
    return Tokenized(
        ids,
        ids % 2 == 0,
        starts,
        np.array(labels, np.int64) if width == 1 else None,
        np.arange(len(labels)) if rows is None else np.array(rows),
        width,
        0,
        "",
        5,
    )


@pytest.mark.parametrize("width", [1, 2])
def test_joined_records_are_those_of_the_parts_in_order(width):
    """Also of parts that are not whole files."""
    one = tokenized(100, [0, 1, 1], rows=[2, 0], width=width)
    two = tokenized(500, [1, 0], width=width)
    both = joined([one, two])
    assert len(both) == 4
    assert both.source < 0
    assert both.tokens == one.tokens + two.tokens
    batches = [*one.batches(1), *two.batches(1)]
    for made, wanted in zip(both.batches(1), batches, strict=True):
        for name in ("ids", "mask", "labels"):
            assert np.array_equal(getattr(made, name), getattr(wanted, name))
