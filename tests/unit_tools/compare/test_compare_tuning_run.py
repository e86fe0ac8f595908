"""A complete comparison of tuning: real nodes, real sockets, a tiny base."""

import importlib.util
import json

import pytest

from fsl_async.errors import DataError, FslError
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.places import Loopback
from fsl_async.tools.compare.tuning.choices import TuningChoices

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
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


class Apart(Loopback):
    """Sites are processes of their own, as in a network laboratory."""

    def prefix(self, node):
        """No words, and yet a process."""
        del node
        return ()


def comparison(tmp_path, base, sites, places=Loopback, **more):
    from fsl_async.tools.compare.tuning.records import load_records
    from fsl_async.tools.compare.tuning.runs import TuningComparison

    data = tuple(records(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(sites))
    choices = TuningChoices(
        base=str(base),
        data=data,
        batch=2,
        learning_rate=1e-2,
        **{"methods": ("fedit",), "rounds": 2, "sets": STEADY, **more},
    )
    said = []
    found = TuningComparison(
        choices,
        load_records(choices),
        tmp_path / "out",
        places,
        say=said.append,
        stop=Stopper(),
    )
    return found, said


def test_one_site_in_a_run_learns_what_it_learns_alone(tmp_path, base):
    """The mean of one is itself: the scored version is that of training without a network."""
    held = records(tmp_path / "held.jsonl", 4)
    found, said = comparison(tmp_path, base, [9], Apart, held_out=held)
    run, local = found.run("fedit"), found.local()
    assert [p.round for p in run.points] == [1, 2]
    assert run.points[1].loss < run.points[0].loss
    assert run.last.loss == pytest.approx(local.last.loss, rel=1e-5)
    assert run.last.accuracy is None
    # Adapters of rank 2 at 2 layers: queries 32 x 32, values 32 x 16. fp32 each way, each round.
    size = 4 * 2 * 2 * (32 + 32 + 32 + 16)
    payload = run.sites["client-1"]["payload"]
    assert payload == {"adapters up": size, "adapters down": size}
    assert 20e6 < run.memory < 200e6
    assert said[1].startswith("fedit: round 2 of 2, loss ")


def test_sites_of_both_orders_take_part(tmp_path, base):
    """The one without gradients sends a number for each direction, not its adapters."""
    held = records(tmp_path / "held.jsonl", 2)
    sets = (*STEADY, "tune.zo_steps=2", "tune.zo_probes=3")
    orders = ("first", "zeroth")
    found, _ = comparison(tmp_path, base, [4, 4], held_out=held, orders=orders, sets=sets)
    run = found.run("fedit")
    assert [p.round for p in run.points] == [1, 2]
    first, zeroth = (run.sites[f"client-{n}"]["payload"] for n in (1, 2))
    adapters = {"adapters down": 4 * 2 * 2 * (32 + 32 + 32 + 16)}
    assert first == {**adapters, "adapters up": adapters["adapters down"]}
    assert zeroth == {**adapters, "scalars up": 4 * 2 * 3}


def test_sites_hold_records_back_for_all(tmp_path, base):
    """Without --eval the held-out parts of all sites are scored on, and no site trains on them."""
    sets = (*STEADY, "data.holdout=0.25")
    found, _ = comparison(tmp_path, base, [8, 12], sets=sets)
    assert [len(one) for one in found.records.trained] == [6, 9]
    assert len(found.records.held) == 5
    pooled = found.pooled()
    assert pooled.last.round == 2
    assert pooled.last.loss < 6


def test_a_node_that_fails_ends_the_comparison(tmp_path, base):
    """Its own error is raised, and no other node waits for it."""
    found, _ = comparison(tmp_path, base, [4, 4])
    (tmp_path / "1.jsonl").write_text("")
    with pytest.raises(FslError, match="holds no rows"):
        found.run("fedit")


def test_errors_are_raised_before_anything_starts(tmp_path, base):
    """Records of a wrong kind are found before a model is loaded."""
    with pytest.raises(DataError, match=r"held\.txt"):
        comparison(tmp_path, base, [4], held_out=str(tmp_path / "held.txt"))
    assert not (tmp_path / "out").exists()
