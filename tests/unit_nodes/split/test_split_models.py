"""Models and data over real sockets.

Images, sentences of different lengths, Hugging Face's models, the user's own, adapters.
"""

import importlib.util
import json
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from split_lockstep import check_equal, kept

from fsl_async.errors import RefusedError, TaskError
from fsl_async.learn.split import build

needs_hf = pytest.mark.skipif(
    not (importlib.util.find_spec("peft") and importlib.util.find_spec("pyarrow")),
    reason="needs the extra hf",
)

OWN = """
from torch import nn

WIDTH = 5

def net(shape, classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], WIDTH),
        nn.ReLU(), nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, classes)
    )

def small(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 3), nn.Tanh(), nn.Linear(3, outputs))

def narrow(shape, outputs):
    return nn.Linear(shape[0], outputs - 1)
"""


@pytest.fixture
def own(tmp_path):
    """A file with a model and auxiliary models of the user's."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def sentences(tmp_path):
    """A folder as `save_to_disk` leaves it: 24 sentences of 2 to 20 bytes."""
    import pyarrow as pa

    folder = tmp_path / "sentences"
    folder.mkdir()
    chance = np.random.default_rng(3)
    rows = ["".join(map(chr, chance.integers(97, 107, length % 19 + 2))) for length in range(24)]
    table = pa.table({"text": rows})
    with pa.ipc.new_stream(str(folder / "data-0.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder, rows


LOCKSTEP = ["split.mode=lockstep", "split.optimizer=sgd", "train.learning_rate=0.05"]


@pytest.mark.parametrize(
    "method",
    [
        "sl",
        "fsl-sage",
        *(
            pytest.param(one, marks=pytest.mark.sweep)
            for one in ("splitfed-v1", "splitfed-v2", "cse-fsl")
        ),
    ],
)
def test_a_run_in_lockstep_is_the_computation_in_one_process(method, nodes, configured, text):
    """The network must not change the result: the same calls in the same order. In a U-shape a step
    crosses the cut twice without labels.
    """
    at_home = method == "splitfed-v2"
    config = configured(
        f"split.method={method}",
        f"split.labels_at_home={str(at_home).lower()}",
        f"data.path={text}",
        f"run.rounds={4 if method == 'sl' else 3}",
        *LOCKSTEP,
    )
    run = nodes(config)
    check_equal(run, config)
    assert ("labels up" in run.summaries["server"].traffic["payload"]) != at_home


def test_images_by_sockets_are_the_computation_in_one_process(nodes, configured, images):
    """Readers, partition, normalization, cut and auxiliary net of an image model, end to end."""
    config = configured(
        "split.method=fsl-sage",
        "model.family=small-cnn",
        "model.sizes=width=4",
        "data.sample_shape=1x8x8",
        "data.classes=10",
        f"data.path={images()}",
        "run.rounds=2",
        *LOCKSTEP,
    )
    check_equal(nodes(config), config)


def test_a_custom_model_and_a_custom_auxiliary(nodes, configured, images, own):
    """Any nn.Sequential, cut behind any child, with the user's auxiliary net."""
    config = configured(
        "split.method=cse-fsl",
        f"model.family={own}:net",
        f"split.auxiliary={own}:small",
        "split.cut=2",
        f"data.path={images()}",
        "data.sample_shape=1x8x8",
        "data.classes=10",
        *LOCKSTEP,
    )
    code = {"model": f"{own}:net", "auxiliary": f"{own}:small"}
    run = nodes(config, own={"site-a": code, "site-b": code})
    found = kept(run)
    assert {name for name in found if name.startswith("server/")} == {
        f"server/{child}.{kind}" for child in "35" for kind in ("weight", "bias")
    }
    traffic = run.summaries["site-a"].traffic["payload"]
    assert (
        traffic["activations up"] == 6 * 5 * 4
    )  # steps 0 and 2, batches of 4 and 2, five values each
    both = [run.summaries[site].traffic["payload"]["auxiliary up"] for site in ("site-a", "site-b")]
    once = 4 * (5 * 3 + 3 + 3 * 10 + 10)
    assert sorted(both) == [
        once,
        2 * once,
    ]  # one more of each, and the initial one of who was first


def test_the_example_of_an_own_model_is_one(configured):
    """Users begin with a copy of it."""
    example = Path(__file__).parents[3] / "examples" / "split_model.py"
    config = configured(
        "split.method=fsl-sage",
        f"model.family={example}:net",
        f"split.auxiliary={example}:small",
        "split.cut=stage1",
        "data.sample_shape=3x32x32",
        "data.classes=10",
    )
    parts = build.build_parts(config, at_client=True)
    _, _, cut, other = build.build_server(config, torch.device("cpu"))
    assert cut.shape == (16, 16, 16)
    assert parts.architecture == other.architecture
    first, second = parts.model.client.state_dict(), other.model.client.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first), "the seed is the run's"


def test_a_configuration_cannot_choose_the_code_of_a_client(nodes, configured, images, own):
    """A site runs its own copy of code or none; the error says how."""
    config = configured(
        "split.method=splitfed-v2", f"model.family={own}:net", f"data.path={images()}"
    )
    run = nodes(config, names=("site-a",), failing=True)
    assert isinstance(run.errors["site-a"], TaskError)
    assert "give this client its copy with --model FILE.py:FUNCTION" in str(run.errors["site-a"])


LOOP = """
import torch
from fsl_async.learn.split.task import begin

def train(fed):
    split = begin(fed)
    for number in fed.rounds():
        chance = torch.Generator().manual_seed(number)
        for _ in range(3):
            images = torch.randn(4, 1, 8, 8, generator=chance)
            split.train_batch(images, images[:, 0, 0].argmax(1))
        if not fed.end_round(samples=12):
            return
"""


def test_a_custom_loop_trains_the_runs_parts(nodes, configured, own, tmp_path):
    """Batches come from the task.

    The loop is a task, the model is the run's, and both are this site's copies.
    """
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    config = configured(
        "split.method=splitfed-v1",
        f"model.family={own}:net",
        "data.sample_shape=1x8x8",
        "data.classes=10",
        "train.task=loop.py:train",
    )
    code = {"model": f"{own}:net"}
    run = nodes(config, task=f"{path}:train", own={"site-a": code, "site-b": code})
    assert run.summaries["server"].uploads == 6
    assert run.summaries["site-a"].tokens == 12
    run = nodes(config, names=("site-a",), task=f"{path}:train", failing=True)
    assert "--model FILE.py:FUNCTION" in str(run.errors["site-a"])


@pytest.mark.parametrize("changed", ["WIDTH = 6", "cut"])
def test_a_client_of_another_architecture_is_refused(
    changed, *, nodes, configured, images, own, tmp_path
):
    """It gets one line with the difference and exit code 2, and the run goes on."""
    config = configured(
        "split.method=splitfed-v2",
        f"model.family={own}:net",
        f"data.path={images()}",
        "split.cut=2",
        clients=1,
    )
    other = tmp_path / "other.py"
    text = OWN.replace("nn.ReLU(), nn.Linear(WIDTH, 7)", "nn.Linear(WIDTH, 7)", 1)
    other.write_text(OWN.replace("WIDTH = 5", "WIDTH = 6") if changed != "cut" else text)
    run = nodes(config, names=("site-a",), own={"site-a": {"model": f"{other}:net"}}, failing=True)
    error = run.errors["site-a"]
    assert isinstance(error, RefusedError)
    assert error.exit_code == 2
    assert "part of site-a is" in str(error) or "cut of site-a is" in str(error), str(error)


@needs_hf
def test_padding_is_not_sent(nodes, configured, sentences):
    """Sentences differ in length.

    Only rows of tokens cross the cut, in both directions.
    """
    folder, rows = sentences
    config = configured(
        "split.method=splitfed-v2",
        "model.family=llama",
        "model.context=12",
        f"data.path={folder}",
        "split.samples=0",
        "train.batch=5",
        *LOCKSTEP,
    )
    run = nodes(config)
    tokens = sum(min(len(row) - 1, 12) for row in rows)
    found = [run.summaries[name].traffic["payload"] for name in run.names]
    assert sum(each["labels up"] for each in found) == tokens
    for what in ("activations up", "gradients down"):
        assert sum(each[what] for each in found) == tokens * 32 * 4
    config = attrs.evolve(config, split=attrs.evolve(config.split, samples=12))
    check_equal(run, config)


@needs_hf
def test_only_adapters_travel_and_are_kept(nodes, configured, text):
    """LoRA at both ends.

    The parameter server gets adapters alone, and the split server keeps nothing else.
    """
    config = configured(
        "split.method=fsl-sage",
        "model.family=gpt2",
        f"data.path={text}",
        "split.lora_client=2",
        "split.lora_server=3",
        *LOCKSTEP,
    )
    run = nodes(config)
    found = check_equal(run, config)
    names = [name.partition("/")[2] for name in found if name not in {"steps", "updates"}]
    assert names
    assert all("lora_" in name for name in names)
    manifest = json.loads((run.run_dir / "ps" / "manifest.json").read_text())
    stored = [tensor[0] for tensor in manifest["tensors"]]
    assert stored
    assert all("lora_" in name for name in stored)


GPT2_SIZES = {"vocab_size": 256, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16}


@needs_hf
def test_a_pretrained_gpt2_trains_by_adapters_with_the_example(
    nodes, configured, sentences, tmp_path, monkeypatch
):
    """The weights of a folder are those that train, and another folder's are refused."""
    import transformers

    for name, seed in (("base", 0), ("other", 1)):
        torch.manual_seed(seed)
        sizes = transformers.GPT2Config(**GPT2_SIZES, bos_token_id=0, eos_token_id=0)
        transformers.GPT2LMHeadModel(sizes).save_pretrained(tmp_path / name)
    monkeypatch.setenv("GPT2_DIR", str(tmp_path / "base"))
    example = Path(__file__).parents[3] / "examples" / "split_gpt2.py"
    sets = ["lora_client=2", "lora_server=3", "lora_dropout=0.1", "label_smoothing=0.1"]
    config = configured(
        "split.method=fsl-sage",
        f"model.family={example}:net",
        "model.context=12",
        f"data.path={sentences[0]}",
        *(f"split.{one}" for one in sets),
        *LOCKSTEP,
    )
    code = {"model": f"{example}:net"}
    run = nodes(config, own={"site-a": code, "site-b": code})
    assert run.summaries["server"].uploads > 0
    found = check_equal(run, config)
    assert any("lora_B" in name and value.any() for name, value in found.items())
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base").state_dict()
    parts = build.build_parts(config, at_client=False)
    frozen = parts.model.client.state_dict()["trunk.wte.weight"]
    assert torch.equal(frozen, base["transformer.wte.weight"])
    monkeypatch.setenv("GPT2_DIR", str(tmp_path / "other"))
    other = build.build_parts(config, at_client=True).architecture
    assert [key for key, value in other.items() if value != parts.architecture[key]] == [
        "frozen weights"
    ]
