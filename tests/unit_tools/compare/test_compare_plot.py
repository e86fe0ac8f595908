"""The picture of a comparison."""

import attrs

from fsl_async.tools.compare.outcome import Outcome, Point
from fsl_async.tools.compare.table import draw, figure_of


def outcome(method, *accuracies, megabytes=1.0, **more):
    points = tuple(
        Point(n, accuracy, 1.0, 40.0 * n, {"up": megabytes * 1e6 * n}, {}, {}, 0.5, 2.0)
        for n, accuracy in enumerate(accuracies, 1)
    )
    return Outcome(method=method, points=points, target=0.5, **more)


def test_a_picture_is_drawn(tmp_path):
    """Runs as curves of one color for each method, training alone as a line across."""
    end = attrs.evolve(outcome("pooled"), points=(Point(2, 0.8, 0.5, 2.0),))
    runs = [outcome("bank", 0.5, 0.7), outcome("bank", 0.4, seed=1), outcome("sl"), end]
    draw(runs, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    panel = figure_of(runs, "title").axes[0]
    one, two, _empty, alone, _target = panel.get_lines()
    assert list(one.get_ydata()) == [0.5, 0.7]
    assert one.get_color() == two.get_color() != alone.get_color()
    assert alone.get_linestyle() == "--"
    assert panel.get_ylabel() == "accuracy on the held-out set"
    losses = [attrs.evolve(one, by_loss=True, target=0.0) for one in runs]
    panel = figure_of(losses, "title").axes[0]
    assert list(panel.get_lines()[0].get_ydata()) == [1.0, 1.0]
    assert panel.get_ylabel() == "loss on the held-out set"


def test_a_title_is_text_whatever_the_data_are_called(tmp_path):
    """A name with dollars is no formula, and one that is no UTF-8 does not end the command."""
    draw([outcome("sl")], tmp_path / "x.png", "small-cnn on a$_{b$ and \udcff")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
