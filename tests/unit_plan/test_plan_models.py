"""Plans of models that are built and measured; formulas, where they exist, agree."""

import importlib.util
import json

import pytest

from fsl_async import cli
from fsl_async.config.load import load
from fsl_async.learn.split.build import shapes_of
from fsl_async.plan.methods import PLANNED
from fsl_async.plan.shapes import find_shapes

IMAGES = ["data.sample_shape=3x32x32", "data.classes=100"]


def shapes(*sets, method="fsl-sage"):
    return shapes_of(load(None, [f"split.method={method}", *sets]))


@pytest.mark.parametrize(
    ("name", "cut", "sets"),
    [
        ("gpt-0.5m", "2", ["model.preset=0.5m", "split.cut=2"]),
        ("resnet18-cifar100", "layer2", ["model.family=resnet18", *IMAGES]),
    ],
)
def test_measured_shapes_match_the_formulas(name, cut, sets):
    """Bytes must be equal; values kept for the backward pass agree within a few percent."""
    found, wanted = shapes(*sets), find_shapes(name, cut)
    for part in ("client", "server", "whole", "auxiliary", "tail"):
        mine, theirs = getattr(found, part), getattr(wanted, part)
        assert (mine.parameters, mine.buffers) == (theirs.parameters, theirs.buffers), part
        assert mine.counters == theirs.counters
    assert found.client.activations == pytest.approx(wanted.client.activations, rel=0.03)
    assert found.whole.activations == pytest.approx(wanted.whole.activations, rel=0.05)
    assert (found.cut, found.cut_values, found.tail_values, found.label_bytes) == (
        wanted.cut,
        wanted.cut_values,
        wanted.tail_values,
        wanted.label_bytes,
    )


def test_a_method_without_auxiliary_model_needs_none():
    """This split server's part has no block to make one of, and splitfed needs none."""
    found = shapes(
        "model.family=small-cnn", *IMAGES, "split.cut=relu3", "model.sizes=width=2",
        method="splitfed-v1",
    )  # fmt: skip
    assert found.auxiliary.values == 0
    assert found.server.parameters == 8 * 100 + 100
    assert found.tail.values == 0, "the last cut leaves nothing between it and a tail"


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
def test_frozen_weights_are_held_and_not_sent():
    """With LoRA a client's memory holds its complete part; its bytes are the adapters' alone."""
    layout = {"layers": 2, "width": 32, "heads": 2, "context": 16}
    sizes = ["model.family=llama", *(f"model.{key}={size}" for key, size in layout.items())]
    whole, lora = shapes(*sizes), shapes(*sizes, "split.lora_client=2")
    assert lora.client.parameters < whole.client.parameters / 4
    assert lora.client.frozen == whole.client.parameters
    assert lora.server == whole.server
    a, b = (PLANNED["splitfed-v2"].memory(each, 4) for each in (whole, lora))
    assert b.weights > a.weights
    assert b.gradients + b.optimizer < (a.gradients + a.optimizer) / 4


def test_any_model_is_planned_by_command(capsys, tmp_path):
    """The planner must also plan a user's own model."""
    path = tmp_path / "own.py"
    path.write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    layers = nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, classes)\n"
        "    return nn.Sequential(*layers)\n"
    )
    line = ["plan", "--method", "cse-fsl", "--model", f"{path}:net", "--format", "fp32"]
    for setting in ("data.sample_shape=3x8x8", "data.classes=10", "split.auxiliary=linear"):
        line += ["--set", setting]
    assert cli.main([*line, "--batch", "4", "--samples-per-client", "8", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["cut"] == "1"
    sizes = {
        (one["category"], one["direction"]): one["payload_bytes"]
        for one in made["per_client_and_round"]
    }
    assert sizes["client model", "up"] == 4 * (192 * 8 + 8)
    assert sizes["auxiliary", "up"] == 4 * (8 * 10 + 10)
    assert sizes["activations", "up"] == 4 * 4 * 8
    assert cli.main([*line, "--cut", "9"]) == 2
    shown = capsys.readouterr().err
    assert shown == "error: Sequential has no cut '9'; cuts that exist: 0, 1, 2\n"
