"""The built-in task: pretrain a byte-level GPT on text. It uses the public fed API only: copy it.

Inside a round: Muon for the matrices of blocks and AdamW with betas (0.9, 0.95) for the rest, decay
0.1 on matrices only, gradients clipped to norm 1. The learning rate follows the run's progress, so
all clients train at one rate, whatever their speed and whenever they joined.

The optimizer's moments stay here. After a rebase they describe slightly other weights; averaging
them would cost two more models on the wire and was found not to help (DiLoCo, section 3).
"""

# ruff: noqa: N806 - shapes are suffixes

import math
import sysconfig
from contextlib import nullcontext
from typing import Any

import torch

from fsl_async.errors import DataError
from fsl_async.learn.client.fed_base import FedBase
from fsl_async.learn.client.held_out import HeldOut
from fsl_async.learn.data.corpus import HELD_OUT_SHARE, Corpus, held_out_windows
from fsl_async.learn.models.gpt import GPT, Tables, gpt_config

EVALUATED_BYTES = 1 << 14
"""The held-out tail is sampled down to this: half a second for the smallest model on one core."""
EVALUATED_BATCH = 8
LN2 = math.log(2.0)


def train(fed: FedBase) -> None:
    """Train until the run ends, then report the loss on the held-out tail."""
    settings: dict[str, Any] = {
        "batch": 16,
        "threads": 0,
        "clip_norm": 1.0,
        "evaluate_share": 0.0,
    }
    settings |= fed.config.get("train", {})
    if settings["threads"]:
        # Several clients on one machine: each would start a thread per core, and they would wait
        # for each other.
        torch.set_num_threads(settings["threads"])
    model_config = gpt_config(fed.config)
    corpus = open_corpus(fed.config, model_config.context)
    corpus.shard(*fed.part)  # too short a part is an error before this client joins in anything
    model = GPT(model_config, seed=fed.seed).to(fed.device)
    if fed.ranks > 1:
        shard(model, fed)
    fed.attach(model)
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)
    held_out = HeldOut(fed, lambda: measured(model, corpus), settings["evaluate_share"])
    # Ranks decide by clocks of their own when to evaluate, and must do it together.
    if fed.part[0] or fed.ranks > 1 or not corpus.held_out.bytes:
        held_out.never()
    skipped = 0
    for window_BS in fed.shard(corpus, batch=settings["batch"]):
        with autocast(fed.device):
            loss = model.loss(window_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"] or math.inf)
        is_skipped = not bool(torch.isfinite(norm))
        if not is_skipped:
            optimizer.step()
        else:
            # One bad batch must not put NaN into the moments, from where nothing takes it out
            # again.
            skipped += 1
            if skipped == 1:
                fed.log("gradients are not finite: this step is skipped (reported once)")
        optimizer.zero_grad()
        scheduler.step()
        tokens = window_BS.numel() - len(window_BS)
        metrics = {"loss": loss.item(), "skipped": is_skipped, **held_out.due()}
        if not fed.step(tokens=tokens, metrics=metrics):
            break
    if corpus.held_out.bytes:
        with fed.at_version() as version:
            eval_loss = evaluate(model, corpus)
        fed.log(
            f"eval_loss {eval_loss:.4f} nats/byte ({eval_loss / LN2:.4f} bits/byte) on the held-out"
            f" tail, version {version}"
        )


def shard(model: GPT, fed: FedBase) -> None:
    """Shard the model over the ranks of this client (FSDP2), block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(fed.device.type, (fed.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def measured(model: GPT, corpus: Corpus) -> dict[str, float]:
    """Metrics of the model on the held-out tail."""
    loss = evaluate(model, corpus)
    return {"eval_loss": loss, "eval_bits_per_byte": loss / LN2}


def open_corpus(tables: Tables, context: int) -> Corpus:
    """Read [data]. Without a path: the source of Python's library, which every site has."""
    given = tables.get("data", {})
    path = given.get("path") or sysconfig.get_path("stdlib")
    return Corpus.open(path, context=context, held_out=given.get("holdout", HELD_OUT_SHARE))


def autocast(device: torch.device) -> torch.autocast | nullcontext[None]:
    """bf16 products on CUDA; elsewhere it is seldom faster and always less precise."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def evaluate(model: GPT, corpus: Corpus, *, limit_bytes: int = EVALUATED_BYTES) -> float:
    """Mean loss in nats per byte on the held-out tail, the same at all sites. Raises DataError."""
    device = next(model.parameters()).device
    limit = max(1, limit_bytes // (corpus.window_bytes - 1))
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad(), autocast(device):
        for window_BS in held_out_windows(corpus, batch=EVALUATED_BATCH, limit=limit):
            predicted = window_BS.size - len(window_BS)
            loss = model.loss(torch.from_numpy(window_BS).to(device).long())
            total += loss.item() * predicted
            count += predicted
    model.train(was_training)
    if not count:
        raise DataError("nothing is held out (data.holdout is 0): there is nothing to evaluate on")
    return total / count
