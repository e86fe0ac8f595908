"""Zeroth order on a model of your own: a linear head on the mean of a frozen encoder's last states.

    bin/fsl-node --role ps --base ENCODER --set tune.method=zeroth --set run.rounds=400 ...
    bin/fsl-node --role client --base ENCODER --data reviews.jsonl --allow deltas,scalars,metrics
        --task examples/zeroth_head.py:train ADDRESS

ENCODER is a Hugging Face folder. Records are lines of {"text": ..., "label": "negative" or
"positive"}. The encoder runs once; then each round costs a few products of small matrices, and
sends `tune.zo_steps` times `tune.zo_probes` numbers. The weights that the first client begins with
are sent once, so a site must let deltas out as well.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.tune.zeroth import measure_round

LABELS = ("negative", "positive")
TOKENS = 32


def embedded(base, path):
    """Mean of the last states over real tokens, float32 (records, width); labels, (records,)."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    tokenizer, encoder = AutoTokenizer.from_pretrained(base), AutoModel.from_pretrained(base).eval()
    features = []
    with torch.no_grad():
        for start in range(0, len(rows), 64):
            texts = [row["text"] for row in rows[start : start + 64]]
            batch = tokenizer(
                texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            mask = batch["attention_mask"].unsqueeze(-1)
            states = encoder(**batch).last_hidden_state * mask
            features.append(states.sum(1) / mask.sum(1))
    return torch.cat(features), torch.tensor([LABELS.index(row["label"]) for row in rows])


def train(fed):
    """Measure losses around the head's weights, round by round, until the run ends."""
    features, labels = embedded(fed.config["tune"]["base"], fed.config["data"]["path"])
    head = nn.Linear(features.shape[1], len(LABELS))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    fed.attach(head)
    weights, found = ModelWeights(head), []

    def loss(rows):
        found.append(nn.functional.cross_entropy(head(features[rows]), labels[rows]).item())
        return found[-1]

    size, steps = fed.config["train"]["batch"], fed.config["tune"]["zo_steps"]
    chance = torch.Generator().manual_seed(fed.part[0])
    for number in fed.rounds():
        batches = [torch.randint(len(labels), (size,), generator=chance) for _ in range(steps)]
        scalars = measure_round(fed, weights, loss, batches, number=number)
        metrics = {"loss": sum(found) / len(found)}
        found.clear()
        if not fed.end_round(samples=size * steps, metrics=metrics, scalars=scalars):
            break
