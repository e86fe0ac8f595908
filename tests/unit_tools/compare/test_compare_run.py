"""Complete comparisons: real nodes as processes, real sockets, tiny images or a tiny base."""

import importlib.util
import json

import numpy as np
import pytest
from split_lockstep import start

from fsl_async.errors import DataError, FslError
from fsl_async.learn.data.facts import facts_of
from fsl_async.learn.split import build, task, weights
from fsl_async.learn.split.model_parts import ServerPartOptions
from fsl_async.process.stopper import Stopper
from fsl_async.roles.split.methods import method_of
from fsl_async.tools.compare.split import SplitChoices, SplitComparison
from fsl_async.tools.compare.tune import TuningChoices
from fsl_async.tools.demo.places import Places
from fsl_async.tools.demo.scenario import Stage

pytestmark = pytest.mark.usefixtures("one_thread")
needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")


def split(images, *methods, more=(), **fields):
    settings = {
        "model.sizes": "width=4",
        "split.align_passes": 2,
        "split.up": "fp32",
        "split.down": "fp32",
        "split.upload_every": 1,
        "train.batch": 12,
        "train.learning_rate": 0.02,
        **dict(more),
    }
    given = {"clients": 2, "rounds": 2, "settings": settings, **fields}
    return SplitChoices(methods=methods, data=(str(images),), **given)


def play(choices, folder, said=None):
    stage = Stage((lambda _: None) if said is None else said.append, Stopper())
    return list(SplitComparison(choices).outcomes(folder, stage))


def in_one_process(choices, method_name):
    """Return the scores of the same run without a network."""
    config = choices.run(method_name).config
    facts, method = facts_of(config), method_of(config.split)
    parts, optimizer = build.build_parts(config, at_client=False), build.optimizer_of(config)
    settings = ServerPartOptions(optimizer, seed=config.run.seed)
    found = start(
        method, parts.model, choices.names, optimizer, seed=config.run.seed, server=settings
    )
    own = {
        name: task.open_samples(config, facts, (number, choices.clients))
        for number, name in enumerate(choices.names)
    }
    held_out = list(task.held_out(config, facts))
    for number in range(choices.rounds):
        found.round({name: list(one.round(number)) for name, one in own.items()})
        yield weights.evaluate(found.model(), held_out)


def test_scores_are_those_of_one_process_and_bytes_are_counted(images, tmp_path):
    """The scored model joins x_c and x_s of one round; replicas are averaged, before any client
    goes on.
    """
    choices = split(images, "splitfed-v1", "fedavg", more={"split.mode": "lockstep"}.items())
    said = []
    found = play(choices, tmp_path, said)
    for outcome in found:
        wanted = list(in_one_process(choices, outcome.method))
        assert [p.round for p in outcome.points] == [1, 2]
        assert [p.accuracy for p in outcome.points] == [s.accuracy for s in wanted]
        losses = [p.loss for p in outcome.points]
        np.testing.assert_allclose(losses, [s.loss for s in wanted], rtol=1e-5)
        assert outcome.points[1].seconds > outcome.points[0].seconds > 0
        assert 0 <= outcome.points[1].idle_share < 1
        assert outcome.memory > 20e6
        assert not outcome.problem
    # 24 images of each client a round, 4 x 4 x 4 values each at the cut, two rounds of two clients
    payload = found[0].points[-1].payload
    assert payload["activations up"] == payload["gradients down"] == 4 * 24 * 64 * 4
    assert payload["labels up"] == 4 * 24
    assert set(found[1].points[-1].coded) == {"full model up", "full model down"}
    assert said[0].startswith("splitfed-v1: round 1 of 2, accuracy ")
    # What a line says is what the table says: the bytes of the version that closes the round too.
    for line, point in zip(said, [p for one in found for p in one.points], strict=True):
        assert f", {point.bytes / 1e6:,.2f} MB, " in line


@pytest.mark.sweep
def test_a_run_of_turns_ends_at_its_target_when_asked(images, tmp_path):
    """Later rounds would be trained for nothing; a round is a turn of every client."""
    choices = split(images, "sl", rounds=50, target_accuracy=0.2, stops_at_target=True)
    (outcome,) = play(choices, tmp_path)
    assert outcome.reached is not None
    assert outcome.points[-1].round == outcome.reached.round < 10
    assert outcome.points[0].payload["activations up"] == 2 * 24 * 64 * 4


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
    more = {
        "model.sizes": "",
        "split.optimizer": "sgd",
        "split.auxiliary": f"{tmp_path / 'own.py'}:small",
    }
    choices = split(images, "cse-fsl", model=f"{tmp_path / 'own.py'}:net", rounds=1, more=more)
    (found,) = play(choices, tmp_path / "run")
    once = 2 * 4 * (6 * 4 + 4)  # two clients
    assert found.last.payload["auxiliary up"] in {once, once + once // 2}


class Elsewhere(Places):
    """The server is to listen at an address of documentation (RFC 5737)."""

    host = "192.0.2.1"


def test_a_node_that_fails_ends_the_comparison(images, tmp_path):
    """Its own error is raised, and no other node waits for it."""
    stage = Stage(lambda _: None, Stopper(), Elsewhere)
    with pytest.raises(FslError, match=r"192\.0\.2\.1") as caught:
        SplitComparison(split(images, "fedavg")).play("fedavg", tmp_path, stage)
    assert "\n" not in caught.value.message


class Broken(Places):
    """A client's program does not start."""

    def command(self, node):
        """A command that fails without a word of the node."""
        return ("/bin/sh", "-c", "echo no such site; exit 3") if node == "client-2" else ()


def test_a_node_that_dies_is_reported_by_its_last_line(images, tmp_path):
    """The exit code alone told nothing; all that nodes wrote is in a file."""
    stage = Stage(lambda _: None, Stopper(), Broken)
    with pytest.raises(FslError, match=r"client-2 ended \(exit code 3.*: no such site; all") as why:
        SplitComparison(split(images, "fedavg")).play("fedavg", tmp_path, stage)
    assert str(tmp_path / "nodes.log") in why.value.message
    assert "client-2 | no such site" in (tmp_path / "nodes.log").read_text()


def test_a_stop_ends_all_nodes(images, tmp_path):
    """Ctrl-C is the comparison's own: its nodes are in groups of their own."""
    stage = Stage(lambda _: None, Stopper())
    stage.stop.request(reason="Ctrl-C")
    with pytest.raises(FslError, match="the comparison was ended by Ctrl-C"):
        SplitComparison(split(images, "fedavg")).play("fedavg", tmp_path, stage)


STEADY = (
    "codec.up=fp32",
    "codec.down=fp32",
    "train.schedule=constant",
    "train.warmup_steps=0",
    "train.device=cpu",
    "tune.steps=3",
    "tune.rank=2",
    "tune.targets=q_proj,v_proj",
    "tune.context=24",
)


@pytest.fixture
def base(tmp_path):
    from tiny_base import write_llama

    return write_llama(tmp_path / "base")


def records(path, rows):
    lines = [json.dumps({"text": f"the film was a joy to watch and {n}"}) for n in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def tuning(tmp_path, base, sites, **more):
    from fsl_async.tools.compare.alone import TuningComparison

    data = tuple(records(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(sites))
    given = {"methods": ("fedit",), "rounds": 2, "sets": STEADY, **more}
    settings = {"train.batch": 2, "train.learning_rate": 1e-2}
    choices = TuningChoices(base=str(base), data=data, settings=settings, **given)
    said = []
    return TuningComparison(choices), Stage(said.append, Stopper()), said


@needs_peft
def test_one_site_in_a_run_learns_what_it_learns_alone(tmp_path, base):
    """The mean of one is itself: the scored version is that of training without a network."""
    held = records(tmp_path / "held.jsonl", 4)
    found, stage, said = tuning(tmp_path, base, [9], held_out=held)
    run, local = found.play("fedit", tmp_path / "out", stage), found.local(stage)
    assert [p.round for p in run.points] == [1, 2]
    assert run.points[1].loss < run.points[0].loss
    assert run.last.loss == pytest.approx(local.last.loss, rel=1e-5)
    assert run.last.accuracy is None
    # Adapters of rank 2 at 2 layers: queries 32 x 32, values 32 x 16. fp32 each way, each round.
    size = 4 * 2 * 2 * (32 + 32 + 32 + 16)
    payload = run.sites["client-1"]["payload"]
    assert payload == {"adapters up": size, "adapters down": size}
    assert 20e6 < run.memory < 200e6, "it has no torch"
    assert said[1].startswith("fedit: round 2 of 2, loss ")
    assert said[2].startswith("local: client-1 6 steps, loss ")
    assert found.row(local)["choices"]["batch"] == 2


@needs_peft
def test_sites_of_both_orders_take_part(tmp_path, base):
    """The one without gradients sends a number for each direction, not its adapters."""
    held = records(tmp_path / "held.jsonl", 2)
    sets = (*STEADY, "tune.zo_steps=2", "tune.zo_probes=3")
    orders = ("first", "zeroth")
    found, stage, _ = tuning(tmp_path, base, [4, 4], held_out=held, orders=orders, sets=sets)
    run = found.play("fedit", tmp_path / "out", stage)
    assert [p.round for p in run.points] == [1, 2]
    first, zeroth = (run.sites[f"client-{n}"]["payload"] for n in (1, 2))
    zeroth = {name: size for name, size in zeroth.items() if size}  # it may publish the base
    adapters = {"adapters down": 4 * 2 * 2 * (32 + 32 + 32 + 16)}
    assert first == {**adapters, "adapters up": adapters["adapters down"]}
    assert zeroth == {**adapters, "scalars up": 4 * 2 * 3}


@needs_peft
def test_sites_hold_records_back_for_all(tmp_path, base):
    """Without --eval the held-out parts of all sites are scored on, and no site trains on them."""
    sets = (*STEADY, "data.holdout=0.25")
    found, stage, _ = tuning(tmp_path, base, [8, 12], sets=sets)
    assert [len(one) for one in found.records.trained] == [6, 9]
    assert len(found.records.held) == 5
    pooled = found.pooled(stage)
    assert (pooled.last.round, pooled.reached) == (2, None)
    assert pooled.last.loss < 6


@needs_peft
def test_records_of_a_wrong_kind_are_found_before_anything_starts(tmp_path, base):
    """They are found before a model is loaded, too."""
    with pytest.raises(DataError, match=r"held\.txt"):
        tuning(tmp_path, base, [4], held_out=str(tmp_path / "held.txt"))
    assert not (tmp_path / "out").exists()
