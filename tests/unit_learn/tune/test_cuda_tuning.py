"""Fine-tuning with the base on a GPU: the frozen base in bf16, what is trained in fp32."""

import importlib.util
import json

import pytest
import torch

from fsl_async.learn.client.context import ClientContext, choose_device
from fsl_async.learn.client.local_fed import LocalFed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
]
needs_dp = pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs the extra dp")
ROWS, BATCH = 40, 8


@pytest.fixture
def site(tmp_path):
    """Make a site of its own without a network: (Fed, lines)."""
    from tiny_base import write_bert, write_llama

    def make(objective, steps, **tune):
        if objective == "classify":
            base = write_bert(tmp_path / "base")
            rows = [{"text": f"{n} a {'good' if n % 2 else 'bad'} film", "label": n % 2} for n in
                    range(ROWS)]  # fmt: skip
            tune |= {"labels": "bad,good"}
        else:
            base = write_llama(tmp_path / "base")
            rows = [{"text": f"the film was a joy to watch and {n}"} for n in range(ROWS)]
        data = tmp_path / "records.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "tune": {"base": str(base), "objective": objective, "rank": 4, "context": 32}
            | {"method": "lora", "steps": 5} | tune,
            "data": {"path": str(data), "holdout": 0.2},
            "train": {"batch": BATCH, "learning_rate": 1e-2, "warmup_steps": 0},
            "run": {"name": "notes", "rounds": 4, "seed": 1},
        }  # fmt: skip
        lines = []
        context = ClientContext(
            "alice",
            device=choose_device("auto"),
            config=config,
            log=lines.append,
            privacy_folder=tmp_path / "privacy",
        )
        return LocalFed(context, steps=steps), lines

    return make


def trained_and_frozen(model):
    trained = [one for one in model.parameters() if one.requires_grad]
    frozen = [one for one in model.parameters() if not one.requires_grad]
    return trained, frozen


@pytest.mark.parametrize("objective", ["lm", "classify"])
def test_adapters_in_fp32_learn_beside_a_base_in_bf16(site, objective):
    """Rounding adapters to bf16 would lose most steps; the base does not change."""
    from fsl_async.learn.tune import task

    fed, lines = site(objective, steps=40)
    task.train(fed)
    trained, frozen = trained_and_frozen(fed.model)
    assert {one.device.type for one in [*trained, *frozen]} == {"cuda"}
    assert {one.dtype for one in trained} == {torch.float32}
    assert torch.bfloat16 in {one.dtype for one in frozen}
    losses = [found["loss"] for _, found in fed.history]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert "held-out samples" in lines[-1]


@needs_dp
@pytest.mark.parametrize("objective", ["lm", "classify"])
def test_a_private_site_trains_on_the_gpu(site, objective):
    """Gradients of single records, clipping and noise, on the GPU; the budget ends the run."""
    from fsl_async.learn.tune import task

    fed, lines = site(objective, steps=20, rule="ffa", dp_epsilon=8.0, dp_clip=1.0)
    task.train(fed)
    assert len(fed.history) == 20
    trained, _ = trained_and_frozen(fed.model)
    assert all(torch.isfinite(one).all() for one in trained)
    assert any("private training: epsilon 8" in line for line in lines)
