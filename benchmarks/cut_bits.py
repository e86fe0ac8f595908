"""Bits per value at the cut of a split model, by format: `fsl-node plan` estimates sizes with them.

    python benchmarks/cut_bits.py > benchmarks/results/cut_bits.jsonl

Trains the built-in GPT for some hundred steps on the standard library's source, cuts it behind a
block, and encodes the hidden states there, their gradients, and the weights before the cut, each as
one frame. One JSON object a row: what, format, block, bits per value of the complete frame,
relative error (L2). About two minutes on one core.
"""

import argparse
import json
import sysconfig

import numpy as np
import torch

from fsl_async.learn.data.corpus import Corpus, windows
from fsl_async.learn.models.gpt import GPT, PRESETS
from fsl_codecs import CodecSpec, decode, encode

FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")


def cut_tensors(model: GPT, window: torch.Tensor, block: int) -> dict[str, np.ndarray]:
    """Hidden states behind `block`, their gradient, and the weights before the cut, flat fp32."""
    kept = []

    def keep(_module: object, _inputs: object, hidden: torch.Tensor) -> None:
        hidden.retain_grad()
        kept.append(hidden)

    handle = model.blocks[block - 1].register_forward_hook(keep)
    model.zero_grad()
    model.loss(window).backward()
    handle.remove()
    gradient = kept[0].grad
    assert gradient is not None
    before = [model.embedding, *(w for b in model.blocks[:block] for w in b.parameters())]
    return {
        "activations": kept[0].detach().flatten().numpy(),
        "gradients": gradient.flatten().numpy(),
        "weights": torch.cat([w.detach().flatten() for w in before]).numpy(),
    }


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="0.5m", choices=sorted(PRESETS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = PRESETS[options.preset]
    model = GPT(config)
    corpus = Corpus.open(sysconfig.get_path("stdlib"), context=config.context)
    drawn = windows(corpus, corpus.train, batch=options.batch, seed=0, name="cut_bits")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(0.0)
    for _ in range(options.steps):
        loss = model.loss(torch.from_numpy(next(drawn)).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    window = torch.from_numpy(next(drawn)).long()
    for block in sorted({1, config.layers // 2, config.layers - 1}):
        for what, found in cut_tensors(model, window, block).items():
            values = np.ascontiguousarray(found, np.float32)
            for name in FORMATS:
                frame = encode(values, CodecSpec(format=name))
                error = np.linalg.norm(decode(frame) - values) / np.linalg.norm(values)
                row = {
                    "bench": "cut_bits",
                    "preset": options.preset,
                    "steps": options.steps,
                    "loss": round(loss.item(), 3),
                    "block": block,
                    "what": what,
                    "format": name,
                    "values": values.size,
                    "bits_per_value": round(8 * len(frame) / values.size, 3),
                    "relative_error": float(f"{error:.3g}"),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
