"""Bytes of fine-tuning beforehand: the same as the tensors of a base with adapters."""

import importlib.util
import json

import pytest

from fsl_async import cli
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.plan.tuning import adapter_values

needs_hf = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")


class Layer:
    """A linear layer."""

    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs


def test_formulas_of_the_rules():
    """MiniLM, q and v, rank 8, with a head of two classes: 294,912 + 3,080 bytes up in fp32."""
    minilm = [Layer(384, 384)] * 12
    found = adapter_values(minilm, "fedit", rank=8, site_rank=8, full=770)
    assert (4 * found.up, 4 * found.down) == (294_912 + 3_080, 294_912 + 3_080)
    for rule in ("ffa", "rolora", "fedsvd"):
        assert 4 * adapter_values(minilm, rule, rank=8, site_rank=8, full=0).up == 147_456
    assert adapter_values(minilm, "bank", rank=16, site_rank=2, full=0).up == 12 * 2 * 768
    dense = adapter_values(minilm, "fedex", rank=8, site_rank=8, full=0)
    assert dense.down - dense.up == 12 * 384 * 384


@needs_hf
@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("rule", ["fedit", "ffa", "bank", "fedex"])
def test_the_plan_counts_the_tensors_that_a_client_exchanges(tmp_path, capsys, kind, rule):
    """The model that a client builds has as many values as the planner reads from its files."""
    from tiny_base import write_bert, write_llama

    from fsl_async.learn.client.buffers import ModelWeights
    from fsl_async.learn.client.fed import ClientContext, LocalFed
    from fsl_async.learn.tune.base import load_base

    folder = {"llama": write_llama, "bert": write_bert}[kind](tmp_path / kind)
    tune = {"rule": rule, "objective": "classify", "labels": "no,maybe,yes", "rank": 4}
    config = TuneConfig(method="lora", **tune)
    base = load_base(folder, "classify", labels=config.label_names)
    fed = LocalFed(ClientContext("a", config={"tune": {"method": "lora", **tune}}))
    model = fed.lora(base.model, heads=base.drawn)
    weights = ModelWeights(model, fed.adapters.view)
    sets = [
        part for key, value in tune.items() for part in ("--set", f"tune.{key}={json.dumps(value)}")
    ]
    code = cli.main(
        ["plan", "--method", "lora", "--model", str(folder), "--format", "fp32", "--json", *sets]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    flows = {one["direction"]: one["payload_bytes"] for one in found["per_client_and_round"]}
    assert flows["down"] == 4 * weights.layout.values
    patches = sum(one.values for one in weights.layout.tensors if one.name.endswith(".patch"))
    assert flows["up"] == 4 * (weights.layout.values - patches)
