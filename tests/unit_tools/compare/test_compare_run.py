"""Complete comparisons in this process: real nodes, real sockets, tiny images."""

import itertools
import re
import time

import numpy as np
import pytest
from split_lockstep import start

import fsl_transport
from fsl_async.cli import main
from fsl_async.config.split_rules import split_method
from fsl_async.errors import FslError, UsageError
from fsl_async.learn.data.facts import facts_of
from fsl_async.learn.split import build, lockstep, samples
from fsl_async.learn.split.server import ServerSettings
from fsl_async.process.program import to_install
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.choices import Choices
from fsl_async.tools.compare.comparison import Comparison, _Node
from fsl_async.tools.compare.outcome import Outcome, Point
from fsl_async.tools.compare.places import Loopback, net_of
from fsl_async.tools.compare.plot import check_plot, draw, figure_of
from fsl_async.tools.compare.problem import check, config_of, used

pytestmark = pytest.mark.usefixtures("one_thread")


def choices_for(images, *methods, **more):
    given = {
        "clients": 2,
        "rounds": 2,
        "batch": 12,
        "sizes": "width=4",
        "learning_rate": 0.02,
        "align_passes": 2,
        "up": "fp32",
        "down": "fp32",
        "upload_every": 1,
        **more,
    }
    return Choices(methods=methods, data=str(images), **given)


def run(choices, folder, said=None):
    say = (lambda _: None) if said is None else said.append
    contest = Comparison(choices, folder, Loopback, say=say, stop=Stopper())
    return [contest.run(method) for method in choices.methods]


def in_one_process(choices, method_name):
    """Return the scores of the same run without a network."""
    config = config_of(choices, method_name)
    facts, method = facts_of(config), split_method(config)
    parts, optimizer = build.build_parts(config, at_client=False), build.optimizer_of(config)
    settings = ServerSettings(optimizer, seed=config.run.seed)
    found = start(
        method, parts.model, choices.names, optimizer, seed=config.run.seed, server=settings
    )
    own = {
        name: samples.open_samples(config, facts, (number, choices.clients))
        for number, name in enumerate(choices.names)
    }
    held_out = list(samples.held_out(config, facts))
    for number in range(choices.rounds):
        found.round({name: list(one.round(number)) for name, one in own.items()})
        yield lockstep.evaluate(found.model(), held_out)


def test_settings_beside_the_options_and_a_preset_that_gives_way(images):
    """A published run is compared by its preset; an option that is given counts more."""
    more = {"sets": ("split.betas=0.9,0.999", "data.partition=dirichlet-equal"), "alpha": 0.5}
    found = config_of(choices_for(images, "fsl-sage", optimizer="adam", **more), "fsl-sage")
    assert (found.split.optimizer, found.split.betas) == ("adam", "0.9,0.999")
    assert (found.data.partition, found.data.alpha) == ("dirichlet-equal", 0.5)
    published = choices_for(
        images,
        "cse-fsl",
        sets=("split.preset=published-fsl-sage", "split.align_batch=3"),
        given=("--batch", "--model", "--cut", "--align-passes"),
    )
    found = config_of(published, "cse-fsl")
    assert (found.split.method, found.model.family) == ("cse-fsl", "small-cnn")
    assert (found.train.batch, found.split.buffer_samples) == (12, 1000)
    assert (found.split.align_passes, found.split.align_batch) == (2, 3)
    row = used(published, "cse-fsl")
    assert (row["model"], row["batch"], row["align_passes"]) == ("small-cnn", 12, 2)
    assert (row["optimizer"], row["buffer_samples"]) == ("adam", 1000), "in rows, what has run"
    assert used(choices_for(images, "sl"), "sl") == choices_for(images, "sl").as_dict()
    with pytest.raises(UsageError, match=r"--set train.batch: is set by --batch"):
        config_of(choices_for(images, "sl", sets=("train.batch=4",)), "sl")


def test_a_preset_in_quotation_marks_is_the_same_preset(images):
    """As TOML it would otherwise give way to the options' defaults, silently."""
    plain, quoted = (
        config_of(choices_for(images, "fsl-sage", sets=(f"split.preset={text}",)), "fsl-sage")
        for text in ("published-fsl-sage", '"published-fsl-sage"')
    )
    assert quoted == plain
    assert quoted.model.family == "resnet18"


def test_alpha_beside_a_partition_without_shares_is_refused(images):
    """One of both would be ignored."""
    for kind in ("iid", '"sorted"'):
        choices = choices_for(images, "sl", alpha=0.1, sets=(f"data.partition={kind}",))
        with pytest.raises(UsageError, match=r"--alpha: data.partition = (iid|sorted) has no sh"):
            config_of(choices, "sl")


def test_own_models_are_compared(images, tmp_path):
    """Clients get the files that the command names."""
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    layers = nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 6), nn.ReLU()\n"
        "    return nn.Sequential(*layers, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, classes))\n"
        "def small(shape, outputs):\n"
        "    return nn.Linear(shape[0], outputs)\n"
    )
    own = {"model": f"{tmp_path / 'own.py'}:net", "auxiliary": f"{tmp_path / 'own.py'}:small"}
    choices = choices_for(images, "cse-fsl", sizes="", optimizer="sgd", rounds=1, **own)
    (found,) = run(choices, tmp_path / "run")
    once = 2 * 4 * (6 * 4 + 4)  # two clients
    assert found.last.payload["auxiliary up"] in {once, once + once // 2}


@pytest.fixture
def early(monkeypatch):
    """Record which streams were offered in this process, and how much of each could go with the
    offer.
    """
    found = []
    for kind in (fsl_transport.ListenerEndpoint, fsl_transport.DialerEndpoint):

        def offer(  # noqa: PLR0917 - that of the endpoint
            self, peer, stream_id, meta, source, eager_bytes=0, *, before=kind.offer
        ):
            found.append((stream_id.partition(":")[0], eager_bytes))
            before(self, peer, stream_id, meta, source, eager_bytes)

        monkeypatch.setattr(kind, "offer", offer)
    return found


def test_scores_are_those_of_one_process_and_bytes_are_counted(images, tmp_path, early):
    """The scored model joins x_c and x_s of one round; replicas are averaged, before any client
    goes on.
    """
    choices = choices_for(images, "splitfed-v1", "fedavg", mode="lockstep")
    said = []
    split, whole = run(choices, tmp_path, said)
    for outcome, method in ((split, "splitfed-v1"), (whole, "fedavg")):
        wanted = list(in_one_process(choices, method))
        assert [p.round for p in outcome.points] == [1, 2]
        assert [p.accuracy for p in outcome.points] == [s.accuracy for s in wanted]
        losses = [p.loss for p in outcome.points]
        np.testing.assert_allclose(losses, [s.loss for s in wanted], rtol=1e-5)
        assert outcome.points[1].seconds > outcome.points[0].seconds > 0
        assert 0 <= outcome.points[1].idle_share < 1
    # 24 images of each client a round, 4 x 4 x 4 values each at the cut, two rounds of two clients
    payload = split.points[-1].payload
    assert payload["activations up"] == payload["gradients down"] == 4 * 24 * 64 * 4
    assert payload["labels up"] == 4 * 24
    # all of a step's streams may go with their offers: 12 images, and their labels on the way up
    assert min(size for kind, size in early if kind in {"up", "down"}) >= 12 * 64 * 4
    assert min(size for kind, size in early if kind in {"delta", "full"}) > 0
    assert {kind for kind, _ in early} >= {"up", "down", "delta", "full"}
    assert set(whole.points[-1].coded) == {"full model up", "full model down"}
    assert said[0].startswith("splitfed-v1: round 1 of 2, accuracy ")
    # What a line says is what the table says: the bytes of the version that closes the round too.
    points = [*split.points, *whole.points]
    for line, point in zip([one for one in said if "accuracy" in one], points, strict=True):
        assert f", {point.bytes / 1e6:,.2f} MB, " in line


def test_a_run_ends_at_its_target_when_asked(images, tmp_path):
    """Later rounds would be trained for nothing."""
    choices = choices_for(images, "fsl-sage", rounds=50, target=0.2, stops_at_target=True)
    (outcome,) = run(choices, tmp_path)
    assert outcome.reached is not None
    assert outcome.points[-1].round < 10
    assert outcome.points[-1].coded["activations up"] > 0


def test_a_node_that_fails_ends_the_comparison(images, tmp_path):
    """Its own error is raised, and no other node waits for it."""
    choices = choices_for(images, "fedavg", clients=49)
    with pytest.raises(FslError, match="49 clients, but 48 samples"):
        run(choices, tmp_path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cut": "pool7"}, "no cut 'pool7'; cuts that exist: conv1"),
        ({"auxiliary": "blocks:9"}, "blocks:9"),
        ({"data": "/nothing/here"}, "cannot read data '/nothing/here'|data"),
        ({"sizes": "depth=3"}, "small-cnn cannot be built"),
    ],
)
def test_errors_are_raised_before_anything_starts(images, more, words):
    """A run of an hour does not fail in its third method."""
    choices = (
        choices_for(images, "fsl-sage", **more)
        if "data" not in more
        else Choices(methods=("fsl-sage",), **more)
    )
    with pytest.raises(FslError, match=words) as caught:
        check(choices, "fsl-sage")
    assert "\n" not in caught.value.message


def test_a_link_is_written_as_rate_and_delay():
    """Named profiles are the laboratory's."""
    with pytest.raises(UsageError, match="--net 'moon': a profile of the network laboratory"):
        net_of("moon")
    assert "45 ms each way" in net_of("200mbit,45ms").words
    with pytest.raises(UsageError, match="no setting 'los'"):
        net_of("dsl:los=0%")


def test_a_picture_is_drawn(tmp_path):
    """Three panels with a line for each method; the file is a PNG."""
    points = tuple(
        Point(n, 0.1 * n, 1.0, 2.0 * n, {"activations up": 9}, {}, {}, 0.5, 2.0) for n in (1, 2)
    )
    path = tmp_path / "x.png"
    draw([Outcome("sl", points, 0.5), Outcome("fedavg", (), 0.5)], path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sizes", [(9, 11), (3, 40), (0.05, 900), (2.1e6, 9.4e6), (1, 1e9)])
def test_labels_of_an_axis_do_not_overlap(sizes):
    """Bytes that differ by less than ten times had a label for each of nine small ticks."""
    curves = [
        Outcome(
            str(least),
            tuple(
                Point(n, 0.1 * n, 1.0, 40.0 * n, {"up": least * 1e6 * n}, {}, {}, 0.5, 2.0)
                for n in range(1, 5)
            ),
            0.5,
        )
        for least in sizes
    ]
    figure = figure_of(curves, "title")
    figure.canvas.draw()
    for panel in figure.axes:
        left, right = sorted(panel.get_xlim())
        ticks = [
            tick.label1
            for tick in [*panel.xaxis.get_major_ticks(), *panel.xaxis.get_minor_ticks()]
            if left <= tick.get_loc() <= right and tick.label1.get_text()
        ]
        boxes = sorted((one.get_window_extent() for one in ticks), key=lambda box: box.x0)
        assert len(boxes) >= 2
        assert all(a.x1 + 3 < b.x0 for a, b in itertools.pairwise(boxes)), [str(t) for t in ticks]


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    """The check comes before any training."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=re.escape(to_install("plot"))):
        check_plot(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("option", "name", "problem"),
    [
        ("--png", "no/x.png", "there is no directory"),
        ("--png", "folder.png", "is a directory"),
        ("--png", "x", "call it x.png"),
        ("--png", "x.xyz", "call it x.xyz.png"),
        ("--json", "no/x", "there is no directory"),
        ("--json", "folder.png", "is a directory"),
    ],
)
def test_an_unwritable_file_is_refused_before_anything_is_trained(
    tmp_path, option, name, problem, capsys
):
    """After the last method, hours of training would be lost."""
    (tmp_path / "folder.png").mkdir()
    words = [
        "compare",
        "--methods",
        "fedavg",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*words, option, str(tmp_path / name)]) == 2
    assert problem in "".join(capsys.readouterr())
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("alpha", ["0", "-1"])
def test_alpha_is_above_0(tmp_path, alpha, capsys):
    """0 is refused, not taken for "not given"."""
    words = ["compare", "--methods", "fedavg", "--data", str(tmp_path), "--alpha", alpha]
    assert main([*words, "--out", str(tmp_path / "o")]) == 2
    assert "'--alpha'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--json", "out.json"], ["--json=out.json"], ["--json"]])
def test_errors_go_where_people_read_them_when_json_goes_to_a_file(tmp_path, capsys, words):
    """Standard output is a table for people, so an error there is no JSON object."""
    data = str(tmp_path / "none")
    assert main(["compare", "--methods", "fedavg", "--data", data, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_title_is_text_whatever_the_data_are_called(tmp_path):
    """A name with dollars is no formula, and one that is no UTF-8 does not end the command."""
    draw([Outcome("sl", (), 0.5)], tmp_path / "x.png", "small-cnn on a$_{b$ and \udcff")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_node_that_dies_is_reported_by_its_last_error(tmp_path):
    """A traceback goes to its file; the exit code alone told nothing."""
    node = _Node("client-1", lambda _: None, tmp_path)
    node.start(lambda _: None, (), ("fsl_async.no_such_module", "client"), {})
    node.join(time.monotonic() + 30.0)
    found = str(node.error)
    assert found.startswith("client-1 ended with 1: ")
    assert "No module named fsl_async.no_such_module; all that it wrote: " in found
