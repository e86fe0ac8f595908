r"""A pretrained GPT-2 in split learning: adapters (LoRA) train at both sides of the cut.

    python examples/split_gpt2.py TEXT.jsonl GPT2_DIR tokens        # once, at each site

    export GPT2_DIR=/models/gpt2
    bin/fsl-node --role server --with-ps --model examples/split_gpt2.py:net \
        --set split.method=fsl-sage --set split.cut=1 --set split.auxiliary=blocks:3 \
        --set split.lora_client=4 --set split.lora_server=4 --set split.lora_alpha=32 \
        --set split.lora_dropout=0.1 --set split.label_smoothing=0.1 \
        --set split.betas=0.9,0.999 --set split.warmup_steps=500 \
        --set train.learning_rate=2e-4 --set train.weight_decay=0.01 --set train.batch=8 \
        --set model.context=512 --set data.classes=50257 \
        --set data.sharding=local --set sync.clients=2 127.0.0.1:7100
    bin/fsl-node --role client --name site-a --data tokens \
        --model examples/split_gpt2.py:net --allow adapters,activations,labels 127.0.0.1:7100

GPT2_DIR is a folder that `save_pretrained` wrote, with its tokenizer; every node has the same one.
Only adapters are trained and exchanged, so frozen weights must be equal everywhere: the run refuses
a client whose weights in front of the cut are others. These numbers are those of FSL-SAGE's
experiment with GPT-2 medium (arXiv 2505.23182), as far as settings have them; it aligns in 40
passes over 64 samples (split.align_passes, split.buffer_samples).
"""

import json
import os
import sys
from pathlib import Path


def net(shape, classes):
    """Load the model. shape: (context,). classes: the vocabulary's size."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(os.environ["GPT2_DIR"])
    if model.config.vocab_size != classes:
        raise ValueError(
            f"the model has {model.config.vocab_size} tokens: set data.classes to that"
        )
    if model.config.n_positions < shape[0]:
        raise ValueError(f"the model has {model.config.n_positions} positions: set model.context")
    return model


def write_tokens(texts, folder, out):
    """Write the tokens of a JSON Lines file's "text" fields as a data set."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with Path(texts).open(encoding="utf-8") as lines:
        rows = [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
    Dataset.from_dict({"input_ids": rows}).save_to_disk(out)


if __name__ == "__main__":
    write_tokens(*sys.argv[1:])
