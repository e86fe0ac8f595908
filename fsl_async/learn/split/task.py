"""The built-in task of split learning: the built-in GPT, cut at a block, on text. Also what the split server builds of it.

Every node builds its part from the run's configuration and seed, so nothing but what a method sends crosses the network. Batches are a
function of the run's seed, the shard and the round: a client that is launched again goes on where the run is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fsl_async.config import from_wire
from fsl_async.learn.data import Corpus, Span, windows
from fsl_async.learn.fed import Fed
from fsl_async.learn.gpt import GPT, VOCABULARY, GPTConfig
from fsl_async.learn.pretrain import gpt_config, open_corpus
from fsl_async.learn.split import auxiliary as auxiliaries
from fsl_async.learn.split import gpt_parts
from fsl_async.learn.split.alignment import AlignSettings
from fsl_async.learn.split.batches import Batch, cross_entropy
from fsl_async.learn.split.cuts import Halves, split, whole
from fsl_async.learn.split.errors import CutError
from fsl_async.learn.split.methods import method as method_named
from fsl_async.learn.split.methods.base import Method, MethodSettings
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.room import Cut
from fsl_async.learn.split.server import ServerSettings, SplitServer
from fsl_async.learn.split.weights import weights_of
from fsl_async.observe.memory import Mark
from fsl_async.settings import Config
from fsl_async.split_rules import split_rules


@attrs.frozen
class Parts:
    """A cut model as a node needs it. architecture: what has to be the same at every node, in the order of comparison."""

    halves: Halves
    auxiliary: nn.Module | None
    architecture: Mapping[str, str]


def method_of(config: Config) -> Method:
    """The run's method."""
    chosen = config.split
    return method_named(chosen.method, MethodSettings(chosen.upload_every, chosen.align_every))


def optimizer_of(config: Config) -> OptimizerSpec:
    """Of either half, and of auxiliary models that are trained at clients."""
    train = config.train
    return OptimizerSpec(
        config.split.optimizer,
        train.learning_rate,
        weight_decay=train.weight_decay,
        betas=(0.9, 0.95),
    )


def build_parts(config: Config, *, at_client: bool) -> Parts:
    """Cut the run's model. A client builds the weights that it needs and no others; a split server all of them, for a moment.

    Raises CutError for a cut that does not exist, AuxiliaryError, TaskError for sizes that do not fit.
    """
    sizes = gpt_config({"model": attrs.asdict(config.model)})
    chosen = config.split
    method = method_of(config)
    if not method.has_server:
        return Parts(whole(GPT(sizes, seed=config.run.seed)), None, {})
    cut, layers = chosen.cut, sizes.layers
    if cut >= layers:
        there = ", ".join(map(str, range(layers)))
        raise CutError(f"split.cut {cut} does not exist in this GPT; cuts that exist: {there}")
    pieces = _pieces(chosen.auxiliary) if method.auxiliary != "none" else 0
    if at_client:
        needed = range(min(cut + pieces, layers))
        model = gpt_parts.build(sizes, seed=config.run.seed, blocks=needed, ends=True)
    else:
        model = GPT(sizes, seed=config.run.seed)
    halves = split(model, cut, layers if chosen.labels_at_home else None)
    assert halves.server is not None
    extra = None
    if method.auxiliary != "none":
        seen = halves
        if at_client and isinstance(halves.server, gpt_parts.GPTPart) and cut + pieces <= layers:
            # the rest of the server's half has no weights here, and the auxiliary model needs none of them
            seen = Halves(halves.client, halves.server.first_blocks(pieces))
        example = torch.zeros(1, sizes.context, dtype=torch.int64)
        kind = chosen.auxiliary
        extra = auxiliaries.build(kind, seen, Batch(example, example), seed=config.run.seed)
    return Parts(halves, extra, _architecture(config, sizes, halves, extra))


def _pieces(kind: str) -> int:
    text = kind.removeprefix("blocks:")
    return int(text) if text != kind and text.isdecimal() else 0


def _architecture(
    config: Config, sizes: GPTConfig, halves: Halves, extra: nn.Module | None
) -> dict[str, str]:
    assert halves.server is not None
    found = {
        "method": config.split.method,
        "cut": f"block {halves.cut} of {sizes.layers}",
        "labels": "at home" if halves.tail is not None else "sent",
        "client half": weights_of(halves.client).manifest.fingerprint,
        "server half": weights_of(halves.server).manifest.fingerprint,
    }
    if extra is not None:
        found["auxiliary model"] = weights_of(extra).manifest.fingerprint
    return found


def build_server(config: Config, device: torch.device) -> tuple[SplitServer, Method, Cut, Parts]:
    """The split server of the run."""
    parts = build_parts(config, at_client=False)
    method = method_of(config)
    width = gpt_config({"model": attrs.asdict(config.model)}).width
    chosen = config.split
    align = AlignSettings(
        chosen.align_passes,
        chosen.buffer_samples,
        min(chosen.buffer_samples, config.train.batch),
        OptimizerSpec("adam", chosen.align_rate),
    )
    cut = Cut((-1, width), VOCABULARY, per_token=True)
    settings = ServerSettings(
        optimizer_of(config),
        cross_entropy,
        config.run.seed,
        align=align,
        shape=cut.shape,
        classes=cut.classes,
    )
    assert parts.halves.server is not None
    parts.halves.server.to(device)
    extra = None if parts.auxiliary is None else parts.auxiliary.to(device)
    return method.server(parts.halves, settings, extra), method, cut, parts


def batches(
    corpus: Corpus, span: Span, config: Config, shard: int, number: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of round `number`, int64 (<= batch, context): `split.samples` windows, the last batch may be smaller."""
    batch, left = config.train.batch, config.split.samples
    name = f"shard {shard}"
    drawn = windows(corpus, span, batch=batch, seed=config.run.seed, name=name, start=number)
    while left > 0:
        window = torch.from_numpy(next(drawn)[:left]).long()
        left -= len(window)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def warm_up() -> None:
    """A step of a tiny model, then mark memory: what torch loads at its first step is not the model's."""
    model = GPT(GPTConfig(layers=1, width=8, heads=2, context=8))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    Mark.take()


def train(fed: Fed) -> None:
    """Train until the run ends."""
    warm_up()
    tables: dict[str, Any] = {name: dict(table) for name, table in fed.config.items()}
    config = from_wire(tables)
    rules = split_rules(config)
    method = method_of(config)
    corpus = open_corpus(fed.config, gpt_config(fed.config).context)
    span = corpus.shard(*fed.part)
    parts = build_parts(config, at_client=True)
    for part in (parts.halves.client, parts.halves.tail, parts.auxiliary):
        if part is not None:
            part.to(fed.device)
    half = method.client_half(
        parts.halves,
        optimizer_of(config),
        auxiliary=parts.auxiliary,
        seed=fed.seed,
        name=fed.client_name,
        in_flight=rules.in_flight if not (rules.lockstep or rules.labels_at_home) else 1,
    )
    architecture = parts.architecture
    del parts
    split_half = fed.split(half, method, rules, classes=VOCABULARY, architecture=architecture)
    for number in fed.rounds():
        samples = 0
        for inputs, labels in batches(corpus, span, config, fed.part[0], number):
            if not fed.running:
                return
            split_half.train_batch(inputs, labels)
            samples += len(inputs)
        if not fed.end_round(samples=samples):
            return
