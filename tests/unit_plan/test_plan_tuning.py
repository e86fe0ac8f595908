"""Bytes of fine-tuning beforehand: the same as the tensors of a base with adapters."""

import importlib.util
import json

import pytest

from fsl_async import cli
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.plan.methods import Exchanged, adapter_values

needs_hf = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")


class Layer:
    """A linear layer."""

    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs


def test_formulas_of_the_rules():
    """MiniLM, q and v, rank 8, with a head of two classes: 294,912 + 3,080 bytes up in fp32."""
    minilm = [Layer(384, 384)] * 12

    def values(rule, rank=8, site_rank=8, full=0):
        return adapter_values(minilm, rule, rank=rank, site_rank=site_rank, full=full)

    assert values("fedit", full=770) == Exchanged(73_728 + 770, 73_728 + 770)
    assert values("ffa") == Exchanged(36_864, 36_864)
    assert values("rolora") == values("fedsvd") == Exchanged(73_728, 36_864)
    assert values("bank", rank=16, site_rank=2) == Exchanged(12 * 16 * 768, 12 * 2 * 768)
    assert values("fedex") == Exchanged(73_728 + 12 * 384 * 384, 73_728)


@needs_hf
@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("rule", ["fedit", "ffa", "bank", "fedex"])
def test_the_plan_counts_the_tensors_that_a_client_exchanges(tmp_path, capsys, kind, rule):
    """The model that a client builds has as many values as the planner reads from its files."""
    from tiny_base import write_bert, write_llama

    from fsl_async.learn.client.buffers import ModelWeights
    from fsl_async.learn.client.context import ClientContext
    from fsl_async.learn.client.local_fed import LocalFed
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
    assert flows["up"] == flows["down"]


@pytest.mark.parametrize("clients", ["3", "300"])
def test_the_plan_counts_channel_uses_whatever_the_number_of_clients(tmp_path, capsys, clients):
    """All sites send at once, a value that trains in a use."""
    from tiny_base import write_llama

    folder = write_llama(tmp_path / "llama")

    def uses(method, *sets):
        words = [word for one in sets for word in ("--set", one)]
        head = ["plan", "--method", method, "--model", str(folder), "--clients", clients, "--json"]
        assert cli.main([*head, "--format", "fp32", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        up = [one for one in found["per_client_and_round"] if one["direction"] == "up"]
        return found["channel_uses_per_round"], up[0]["payload_bytes"] // 4

    air = "outer.channel=air"
    assert uses("lora")[0] == 0
    for rule in ("fedit", "ffa"):
        sent, values = uses("lora", air, f"tune.rule={rule}")
        assert sent == values > 0
    sent, values = uses("lora", air, "tune.rule=rolora")
    assert sent == values // 2  # the factors take turns
    assert uses("zeroth", air, "tune.zo_probes=7", "tune.zo_steps=2")[0] == 14
    assert cli.main(["plan", "--method", "lora", "--model", str(folder), "--set", air,
                     "--set", "tune.rule=fedex"]) == 2  # fmt: skip
    assert "choose fedit, ffa, rolora" in capsys.readouterr().err
