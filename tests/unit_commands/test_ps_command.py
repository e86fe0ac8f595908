"""What the parameter server's command says before it starts."""

import pytest

from fsl_async.commands.ps import evaluator_line
from fsl_async.config.load import load
from fsl_async.config.recipes import planned_rounds, with_implied


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["run.rounds=12"], 12.0),
        (["run.seconds=3600"], 6.0),
        (["run.seconds=3600", "sync.every_s=10", "run.rounds=100"], 100.0),
        (["run.tokens=1000"], None),
        (["run.seconds=3600", "sync.trigger=rounds"], None),
        (["run.rounds=3", "split.method=splitfed-v1"], None),
        (["run.rounds=3", "tune.method=lora"], None),
    ],
)
def test_rounds_of_a_run_by_its_limits(overrides, expected):
    """A start warns of too few: their model is worse than need be."""
    assert planned_rounds(with_implied(load(None, overrides))) == expected


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], (1.0, 1.0)),
        (["run.rounds=60"], (1.0, 1.0)),
        (["run.rounds=59"], (0.25, 0.25)),
        (["run.rounds=59", "codec.up_step=2"], (2.0, 0.25)),
        (["tune.method=lora"], (0.088, 0.088)),
        (["split.method=splitfed-v1", "codec.down_step=1"], (0.088, 1.0)),
    ],
)
def test_steps_of_uniform_by_the_kind_and_length_of_a_run(overrides, steps):
    """Errors of few rounds do not average out, and activations have no next round."""
    codec = with_implied(load(None, overrides)).codec
    assert (codec.up_step, codec.down_step) == steps
    quarters = [codec.spec_up.step_log2, codec.spec_down.step_log2]
    assert quarters == [{1.0: 0, 2.0: -4, 0.25: 8, 0.088: 14}[step] for step in steps]


def test_a_decay_at_a_date_needs_an_end_and_a_schedule_that_decays():
    """Rates would never reach their last value. A client has no limits, and joins all the same."""
    from fsl_async.errors import ConfigError
    from fsl_async.nodes.ps.decay_requests import check_date

    date = "train.decay_at=2027-01-31T18:00+01:00"
    with pytest.raises(ConfigError, match="needs a planned end"):
        check_date(load(None, [date]))
    check_date(load(None, [date, "run.rounds=100"]))
    with pytest.raises(ConfigError, match="set wsd"):
        check_date(load(None, [date, "run.rounds=100", "train.schedule=cosine"]))
    with pytest.raises(ConfigError, match="a date with a time zone"):
        load(None, ["train.decay_at=2027-01-31", "run.rounds=100"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["tune.method=lora"],
            "--evaluate --name judge --base MODEL --data PROBE fsl://127.0.0.1:7100",
        ),
        (
            ["sync.trigger=rounds", "train.task=own"],
            "--evaluate --name judge --task FILE.py:FUNCTION fsl://127.0.0.1:7100",
        ),
        (
            ["sync.trigger=rounds"],
            "--evaluate --name judge --task FILE.py:FUNCTION --data PROBE fsl://127.0.0.1:7100",
        ),
    ],
)
def test_the_evaluator_has_a_line_of_its_own(overrides, expected):
    """Its records are no site's, and it lets out losses without --allow."""
    config = with_implied(load(None, ["guard.evaluator=judge", *overrides]))
    assert evaluator_line(config, "tcp://127.0.0.1:7100", "").endswith(f" --role client {expected}")
