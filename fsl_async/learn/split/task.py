"""The built-in task of split learning, and what the split server builds of the same model.

Every node builds its part from the run's configuration and seed (models.py), so nothing but what a method sends crosses the network. Batches are a
function of the run's seed, the shard and the round (samples.py): a client that is launched again goes on where the run is.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fsl_async.config.load import from_tables
from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.config.split_rules import split_rules
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.data.facts import Facts, facts_of
from fsl_async.learn.models import auxiliary as auxiliaries
from fsl_async.learn.models import families as models
from fsl_async.learn.models import gpt_parts
from fsl_async.learn.models.cuts import CutError, CutModel, cuts_of, in_one, split
from fsl_async.learn.models.forward import call, evaluating
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.learn.models.lora import apply_lora
from fsl_async.learn.split.alignment import AlignSettings
from fsl_async.learn.split.methods import method as method_named
from fsl_async.learn.split.methods.base import Method, MethodSettings
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.remote import SplitTraining, open_training
from fsl_async.learn.split.samples import batches, open_samples
from fsl_async.learn.split.server import ServerSettings, SplitServer
from fsl_async.learn.split.server_training import Cut
from fsl_async.learn.split.smashed import cross_entropy
from fsl_async.learn.split.weights import weights_of
from fsl_async.process.memory import MemoryMark

__all__ = ["Parts", "batches", "begin", "build_parts", "build_server", "train"]


@attrs.frozen
class Parts:
    """A cut model as a node needs it. architecture: what has to be the same at every node, in the order of comparison.

    features: shape of what the tail of a U-shape is given of one sample; empty for language models, whose samples differ in length.
    """

    halves: CutModel
    auxiliary: nn.Module | None
    architecture: Mapping[str, str]
    features: tuple[int, ...] = ()


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
    """Cut the run's model. Of the built-in GPT a client builds the weights that it needs and no others; of any other model all, for a moment.

    Raises CutError for a cut that does not exist, AuxiliaryError, TaskError and ConfigError for sizes that do not fit.
    """
    facts, chosen, method = facts_of(config), config.split, method_of(config)
    aided = method.auxiliary != "none"
    pieces = _pieces(chosen.auxiliary) if aided else 0
    blocks = None
    if at_client and method.has_server and config.model.family == "gpt":
        # A wrong cut builds one block too many, and is then told by `split`.
        front = int(chosen.cut or 1) if (chosen.cut or "1").isdecimal() else 0
        blocks = range(min(front + pieces, models.gpt_sizes(config, facts).layers))
    model = models.build_model(config, facts, blocks)
    if not method.has_server:
        halves = in_one(model)
        adapted(config, halves, None)
        return Parts(halves, None, {})
    cut = models.default_cut(config, model)
    halves = split(model, cut, models.tail_cut(model) if chosen.labels_at_home else None)
    assert halves.server is not None
    for part in (halves.client, halves.server):
        if next(part.parameters(), None) is None:
            there = ", ".join(models.useful_cuts(model))
            raise CutError(
                f"cut {halves.cut!r} leaves no weights on one side; cuts with weights on both: {there}"
            )
    extra = None
    if aided:
        seen = halves
        rest = halves.server
        if (
            blocks is not None
            and isinstance(rest, gpt_parts.GPTPart)
            and pieces <= len(rest.blocks)
        ):
            # the rest of the server's half has no weights here, and the auxiliary model needs none of them
            seen = CutModel(halves.client, rest.first_blocks(pieces))
        extra = auxiliaries.build(
            chosen.auxiliary, seen, models.example(facts), seed=config.run.seed
        )
    found = _architecture(config, len(cuts_of(model)), halves, extra)
    features: tuple[int, ...] = ()
    if halves.tail is not None and not facts.language:
        features = _through(facts, halves.client, halves.server)
    adapted(config, halves, extra)
    return Parts(halves, extra, found, features)


def _pieces(kind: str) -> int:
    text = kind.removeprefix("blocks:")
    return int(text) if text != kind and text.isdecimal() else 0


def adapted(config: Config, halves: CutModel, extra: nn.Module | None) -> None:
    """Add LoRA in place where the run has it. The auxiliary model is a client's; one that is linear alone trains whole."""
    chosen, seed = config.split, config.run.seed
    alpha = chosen.lora_alpha
    if chosen.lora_client:
        apply_lora(halves.client, rank=chosen.lora_client, alpha=alpha, seed=seed)
        if extra is not None and _pieces(chosen.auxiliary):
            apply_lora(extra, rank=chosen.lora_client, alpha=alpha, seed=seed)
        if halves.tail is not None:
            halves.tail.requires_grad_(requires_grad=False)
    if chosen.lora_server and halves.server is not None:
        apply_lora(halves.server, rank=chosen.lora_server, alpha=alpha, seed=seed)


def _architecture(
    config: Config, places: int, halves: CutModel, extra: nn.Module | None
) -> dict[str, str]:
    assert halves.server is not None
    chosen = config.split
    found = {
        "method": chosen.method,
        "model": "the user's own" if is_own(config.model.family) else config.model.family,
        "cut": f"{halves.cut} of {places} places",
        "labels": "at home" if halves.tail is not None else "sent",
        "client half": weights_of(halves.client).manifest.fingerprint,
        "server half": weights_of(halves.server).manifest.fingerprint,
    }
    if extra is not None:
        found["auxiliary model"] = weights_of(extra).manifest.fingerprint
    if chosen.lora_client or chosen.lora_server:
        found["LoRA ranks"] = f"{chosen.lora_client} at clients, {chosen.lora_server} at the server"
    return found


def build_server(config: Config, device: torch.device) -> tuple[SplitServer, Method, Cut, Parts]:
    """The split server of the run."""
    parts = build_parts(config, at_client=False)
    method, facts, chosen = method_of(config), facts_of(config), config.split
    align = AlignSettings(
        chosen.align_passes,
        chosen.buffer_samples,
        min(chosen.buffer_samples, config.train.batch),
        OptimizerSpec("adam", chosen.align_rate),
    )
    cut = _cut(parts.halves, facts)
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


def _through(facts: Facts, *parts: nn.Module) -> tuple[int, ...]:
    """The shape of what comes of one sample behind these parts."""
    with torch.no_grad(), evaluating(*parts):
        values = models.example(facts).inputs
        for part in parts:
            values = call(part, values, None)
    return tuple(values.shape[1:])


def _cut(halves: CutModel, facts: Facts) -> Cut:
    """What one sample's activations are like."""
    shape = _through(facts, halves.client)
    if not facts.language:
        return Cut(shape, facts.classes, per_token=False)
    return Cut((-1, *shape[1:]), facts.classes, per_token=True, longest=facts.shape[0])


def warm_up() -> None:
    """A step of a tiny model, then mark memory: what torch loads at its first step is not the model's."""
    model = GPT(GPTConfig(layers=1, width=8, heads=2, context=8))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    MemoryMark.take()


def config_of(fed: Fed) -> Config:
    """The run's configuration, as this client was handed it."""
    tables: dict[str, Any] = {name: dict(table) for name, table in fed.config.items()}
    return from_tables(tables)


def begin(fed: Fed, config: Config | None = None) -> SplitTraining:
    """Build this client's part of the run's model and open its session with the split server: for loops of your own too."""
    config = config or config_of(fed)
    rules, method = split_rules(config), method_of(config)
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
    classes, architecture = facts_of(config).classes, parts.architecture
    features = parts.features
    del parts
    return open_training(
        fed, half, method, rules, classes=classes, architecture=architecture, features=features
    )


def _held(training: SplitTraining) -> int:
    """Bytes of this client's weights, and of the vector beside them that deltas are counted from."""
    half, averaged = training.half, training.decisions.averaged
    tensors = [*half.model.parameters(), *half.model.buffers()]
    if half.auxiliary is not None:
        tensors += [*half.auxiliary.parameters(), *half.auxiliary.buffers()]
    weights = {id(each): each.numel() * each.element_size() for each in tensors}
    return sum(weights.values()) + sum(half.export(part).nbytes for part in averaged)


def train(fed: Fed) -> None:
    """Train until the run ends."""
    training = _train(fed)
    if training.decisions.aligned and not training.installed:
        fed.log(
            f"{fed.client_name} has trained with the auxiliary model that it began with: the run ended before an aligned one was there"
        )


def _train(fed: Fed) -> SplitTraining:
    warm_up()
    config = config_of(fed)
    samples = open_samples(config, facts_of(config), fed.part)
    training = begin(fed, config)
    MemoryMark.take(_held(training))
    for number in fed.rounds():
        trained = 0
        for batch in samples.round(number):
            if not fed.running:
                return training
            training.train_batch(batch.inputs, batch.labels, batch.lengths)
            trained += len(batch.inputs)
        if not fed.end_round(samples=trained):
            break
    return training
