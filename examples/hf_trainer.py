"""A Hugging Face `Trainer`, alone or in a run. Only the lines marked + are needed for a run.

    python examples/hf_trainer.py                                         # alone
    fsl-node --role ps --set tune.method=lora --set run.rounds=20 --set sync.every_s=5
    FSL_SERVER=127.0.0.1:7100 python examples/hf_trainer.py 1             # site 1 of the run
    FSL_SERVER=127.0.0.1:7100 python examples/hf_trainer.py 2

In a run training lasts until the run ends, whatever max_steps is.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import fsl_async
import fsl_async.hf  # +

VOCABULARY, CONTEXT = 32, 24


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Texts of this site: numbers that go up by the same step."""
    drawn = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (count, 1), generator=drawn)
    steps = torch.randint(1, 4, (count, 1), generator=drawn)
    rows = (starts + steps * torch.arange(CONTEXT)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def main(seed: int) -> None:
    """Fine-tune a base model that every site has."""
    set_seed(0)  # here the base is drawn: the same at all sites
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=300,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = Trainer(
            base,
            arguments,
            train_dataset=sequences(512, seed),
            eval_dataset=sequences(64, seed + 1000),
        )
        fsl_async.hf.patch(trainer)  # +
        trainer.train()
        print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    with fsl_async.clean_exit():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
