"""The built-in task: pretrain a GPT on text, by bytes or tokens.

It uses the public fed API only: copy it.

Inside a round: Muon for the matrices of blocks and AdamW with betas (0.9, 0.95) for the rest, decay
0.1 on matrices only, gradients clipped to norm 1. The learning rate follows the run's progress, so
all clients train at one rate, whatever their speed and whenever they joined.

The optimizer's moments stay here. After a rebase they describe slightly other weights; averaging
them would cost two more models on the wire and was found not to help (DiLoCo, section 3).
"""

# ruff: noqa: N806 - shapes are suffixes

import math
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from fsl_async.config.site_policy import METRICS
from fsl_async.errors import DataError
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.data.corpus import HELD_OUT_SHARE, Corpus, held_out_windows
from fsl_async.learn.data.sources import location_of
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.models.gpt import GPT, Tables, gpt_config
from fsl_async.roles.phrasing import figure

if TYPE_CHECKING:
    from fsl_async.learn.client.token_data import TokenData


EVALUATED_BYTES = 1 << 14
"""The held-out tail is sampled down to this: half a second for the smallest model on one core."""
EVALUATED_BATCH = 8
LN2 = math.log(2.0)


def train(fed: Fed) -> None:
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
    # Before this client joins in anything: too short a part is an error.
    data = open_data(fed, model_config.context, settings["batch"])
    model = GPT(model_config, seed=fed.seed).to(fed.device)
    if fed.ranks > 1:
        shard(model, fed)
    fed.attach(model)
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)
    # Ranks decide by clocks of their own when to evaluate, and must do it together.
    evaluates = not fed.part[0] and fed.ranks == 1 and data.holds_out
    share = settings["evaluate_share"] if evaluates else 0.0
    held_out = HeldOut(fed, lambda: data.measure(model), share)
    skipped = 0
    for window_BS in data.batches():
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
    if data.holds_out:
        with fed.at_version() as version:
            found = data.measure(model)
        fed.log(
            f"eval_loss {figure(found['eval_loss'], 4)} nats/{data.unit}"
            f" ({figure(found['eval_bits_per_byte'], 4)} bits/byte) on the held-out tail, version"
            f" {version}"
        )


class ByteData:
    """Random windows of a corpus, by bytes. Raises DataError for too short a part.

    unit: what a token is. `TokenData` has the same methods for tokens.
    """

    unit = "byte"

    def __init__(self, fed: Fed, context: int, batch: int) -> None:
        self._fed, self._batch = fed, batch
        self.corpus = open_corpus(fed.config, context)
        self.corpus.shard(*fed.part)
        self.holds_out = bool(self.corpus.held_out.bytes)

    def batches(self) -> Iterator[torch.Tensor]:
        """Windows, int64 (batch, context + 1), until the run ends."""
        return self._fed.shard(self.corpus, batch=self._batch)

    def measure(self, model: GPT) -> dict[str, float]:
        """Metrics of the model on the held-out tail."""
        return measured(model, self.corpus)


def open_data(fed: Fed, context: int, batch: int) -> "ByteData | TokenData":
    """The client's data: bytes of text, or tokens of texts. Raises DataError, TaskError."""
    if is_bytes_of_text(fed.config):
        return ByteData(fed, context, batch)
    from fsl_async.learn.client.token_data import TokenData

    return TokenData(fed, context, batch)


def is_bytes_of_text(tables: Tables) -> bool:
    """Whether the data are files of text, and a token is a byte."""
    path = tables.get("data", {}).get("path")
    has_tokenizer = tables.get("model", {}).get("tokenizer") or tables.get("data", {}).get(
        "tokenizer"
    )
    return not has_tokenizer and (not path or location_of(str(path)).kind == "text")


def shard(model: GPT, fed: Fed) -> None:
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
    limit = max(1, limit_bytes // (corpus.window_bytes - 1))
    total, count = nats_of(model, held_out_windows(corpus, batch=EVALUATED_BATCH, limit=limit))
    if not count:
        raise DataError("nothing is held out (data.holdout is 0): there is nothing to evaluate on")
    return total / count


def nats_of(model: GPT, batches: Iterable[NDArray[Any]]) -> tuple[float, int]:
    """Sum of the losses of all tokens but the first of each window, in nats, and their number.

    batches: of windows, integers (windows, tokens).
    """
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad(), evaluating(model), autocast(device):
        for window_BS in batches:
            predicted = window_BS.size - len(window_BS)
            loss = model.loss(torch.from_numpy(window_BS).to(device).long())
            total += loss.item() * predicted
            count += predicted
    return total, count


class HeldOut:
    """Measures new versions, one at a time. Nothing where the site keeps metrics to itself.

    measure: returns metrics of the model as it is, with names that begin with eval_. share: of the
    training thread's time that it may take; 0: never.
    """

    def __init__(self, fed: Fed, measure: Callable[[], Mapping[str, float]], share: float) -> None:
        self._fed = fed
        self._measure = measure
        self._pause = 1.0 / share - 1.0 if share and fed.policy.lets(METRICS) else math.inf
        self._seen = -1
        self._next_at = 0.0

    def due(self) -> dict[str, float]:
        """Metrics of a new version, and its number; empty if none is due, or this client leaves."""
        fed = self._fed
        if self._pause == math.inf or fed.version == self._seen or fed.is_leaving():
            return {}
        begun = time.monotonic()
        if begun < self._next_at:
            return {}
        with fed.at_version() as version:
            found = dict(self._measure()) if version >= 0 else {}
        self._seen = fed.version
        ended = time.monotonic()
        self._next_at = ended + self._pause * (ended - begun)
        return {**found, "eval_version": float(version)} if found else {}
