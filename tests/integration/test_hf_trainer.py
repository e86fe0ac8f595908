"""Scripts around a Hugging Face Trainer: alone, in a run of two, and as two ranks."""

import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def script(seed, server):
    """Start the script in the run of `server`."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, seed],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FSL_SERVER": server},
    )


def held_out(text):
    """The loss that the script prints at its end."""
    found = re.search(r"held-out loss (\S+)", text)
    assert found, text
    return float(found[1])


def test_two_lines_put_a_trainer_into_a_run(site, tmp_path, capsys):
    """The script without the lines trains alone; with them until the run ends, with others."""
    lines = SCRIPT.read_text().splitlines()
    added = [line for line in lines if line.endswith("# +")]
    assert len(added) == 2
    by_steps = {"sync__trigger": "rounds", "tune__steps": 10, "run__rounds": 4}
    server = site.server(tune__method="lora", sync__clients=2, sync__min_clients=2, **by_steps)
    with script("1", site.address) as one, script("2", site.address) as two:
        alone = tmp_path / "alone.py"
        kept = [line for line in lines if line not in added]
        alone.write_text("\n".join(kept).replace("max_steps=300", "max_steps=5"))
        runpy.run_path(str(alone))["main"](seed=1)
        text = capsys.readouterr().out
        held_out(text)
        assert "joined run" not in text
        texts = [process.communicate(timeout=100 * UNIT_S)[0] for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), texts
    assert server.end() == 0
    assert [fact["version"] for fact in site.ledger("version")] == list(range(5))
    accepted = site.ledger("accepted")
    assert len({fact["key"].split("/")[0] for fact in accepted}) == 2
    # Rank 8 in 2 blocks: q, k, v, o of 48 x 48; gate, up, down of 48 x 96.
    exchanged = 2 * 8 * (4 * (48 + 48) + 3 * (48 + 96))
    steps = Counter()
    for fact in accepted:
        # A step is two batches of 8 rows of 24 tokens, the first of which nothing predicts.
        assert fact["tokens"] == fact["steps"] * 2 * 8 * 23
        client = fact["key"].split("/")[0]
        steps[client] += fact["steps"]
        facts = {name: fact["facts"][name] for name in ("rank", "order", "data_drawn")}
        assert facts == {"rank": 8.0, "order": 1.0, "data_drawn": float(steps[client])}
        assert 0 < fact["bytes"] < 4 * exchanged
    losses = [held_out(text) for text in texts]
    assert all(loss < 3.2 for loss in losses), texts  # ln 32 = 3.47 at the start


RUN_CLM = '''
"""In the style of transformers' run_clm.py: a text in blocks, a config, a Trainer."""
import sys
from dataclasses import dataclass
import torch
from transformers import (
    HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments,
    default_data_collator, set_seed,
)
import fsl_async, fsl_async.hf

@dataclass
class DataArguments:
    server: str
    block_size: int = 16

def blocks(text, size):
    ids = list(text.encode())
    rows = [ids[start : start + size] for start in range(0, len(ids) - size, size)]
    return [{"input_ids": row, "labels": row} for row in rows]

def main():
    data, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16,
    ))
    rows = blocks("A text that stays at its site, and is trained there. " * 30, data.block_size)
    trainer = Trainer(model, args, train_dataset=rows, data_collator=default_data_collator)
    step, seen = trainer.training_step, []

    def training_step(model, inputs, *more, **named):
        seen.append(inputs["labels"][:, 1:].numel())
        return step(model, inputs, *more, **named)

    trainer.training_step = training_step
    fsl_async.hf.patch(trainer, data.server)
    trainer.train()
    trainer.save_model()
    ids = torch.arange(16)[None]
    torch.save(
        {
            "tokens": sum(seen),
            "weights": dict(trainer.model.named_parameters()),
            "logits": trainer.model.eval()(ids).logits,
            "stopped": trainer.control.should_training_stop,
        },
        f"rank-{args.process_index}.pt",
    )

if __name__ == "__main__":
    with fsl_async.clean_exit():
        main()
'''


@pytest.mark.cold
@pytest.mark.sweep
def test_two_ranks_of_a_trainer_are_one_client(site):
    """By `torchrun`, with the same two lines; rank 0 saves adapters that peft loads."""
    server = site.server(
        tune__method="lora", sync__trigger="rounds", tune__steps=4, run__rounds=2, sync__clients=1
    )
    (site.folder / "run_clm.py").write_text(RUN_CLM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = (
        f"--server {site.address} --output_dir out --use_cpu --per_device_train_batch_size 3"
        " --gradient_accumulation_steps 2 --learning_rate 0.01 --report_to none"
        " --save_strategy steps --save_steps 5 --disable_tqdm true"
    )
    subprocess.run(
        [*torchrun, "run_clm.py", *options.split()],
        cwd=site.folder,
        check=True,
        timeout=100 * UNIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.end() == 0
    ranks = [torch.load(site.folder / f"rank-{rank}.pt") for rank in (0, 1)]
    assert all(rank["stopped"] for rank in ranks)
    accepted = site.ledger("accepted")
    assert [one["steps"] for one in accepted] == [4, 4]
    assert sum(one["tokens"] for one in accepted) == sum(rank["tokens"] for rank in ranks)
    assert [rank["tokens"] for rank in ranks] == [8 * 2 * 3 * 15] * 2
    weights = [rank["weights"] for rank in ranks]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
    saved = site.folder / "out"
    assert {one.name for one in saved.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-8"}
    for folder in (saved, saved / "checkpoint-8"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        found = loaded.eval()(torch.arange(16)[None]).logits
        torch.testing.assert_close(found, ranks[0]["logits"], rtol=0, atol=1e-5)
