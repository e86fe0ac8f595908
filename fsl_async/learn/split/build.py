"""Builds the parts of a run's model: the client's, the split server's, and the auxiliary model.

Every node builds its part from the run's configuration and seed (`models.families`), so nothing but
what a method sends crosses the network. `client_part` and `split_server` make the parts of a method
from any cut model.
"""

import functools
from collections.abc import Mapping

import attrs
import torch
from torch import nn

from fsl_async.config.presets import DECAY_SHARES
from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.data.facts import Facts, facts_of
from fsl_async.learn.models import auxiliary as auxiliaries
from fsl_async.learn.models import families as models
from fsl_async.learn.models.adapters import apply_lora
from fsl_async.learn.models.cuts import CutError, CutModel, cuts_of, in_one, split
from fsl_async.learn.models.forward import call, evaluating
from fsl_async.learn.models.gpt import GPTPart
from fsl_async.learn.split.alignment import AlignSettings
from fsl_async.learn.split.model_parts import ClientPart, ClientPartOptions
from fsl_async.learn.split.optimizers import OptimizerSpec, Rates
from fsl_async.learn.split.server_training import ServerSettings, SplitServer, UploadShape
from fsl_async.learn.split.smashed import Loss, cross_entropy
from fsl_async.learn.split.weights import weights_of
from fsl_async.roles.split.methods import Method, method_of


def check(method: Method, model: CutModel, auxiliary: nn.Module | None) -> None:
    """Raise ConfigError, in one line, when the method cannot run on such parts."""
    if method.has_server and model.server is None:
        raise CutError(f"{method.name} needs a model that is cut")
    if not method.has_server and model.server is not None:
        raise CutError(f"{method.name} trains the whole model at the clients: do not cut it")
    if method.auxiliary != "none":
        if model.tail is not None:
            raise CutError(f"{method.name} needs labels at the split server: it has no U-shape")
        if auxiliary is None:
            raise ConfigError(f"{method.name} needs an auxiliary model", "split.auxiliary")


def client_part(
    method: Method,
    model: CutModel,
    options: ClientPartOptions,
    auxiliary: nn.Module | None = None,
) -> ClientPart:
    """A client's part for this method, of the very modules given.

    A second client needs copies of them.
    """
    check(method, model, auxiliary)
    if not method.has_server:
        auxiliary = nn.Identity()  # the loss is that of the model's own outputs
    return ClientPart(
        model.client,
        options,
        tail=model.tail,
        auxiliary=None if method.auxiliary == "none" and method.has_server else auxiliary,
        trains_auxiliary=method.auxiliary == "trained",
    )


def split_server(
    method: Method,
    model: CutModel,
    settings: ServerSettings,
    auxiliary: nn.Module | None = None,
) -> SplitServer:
    """The split server for this method, of the very modules given."""
    check(method, model, auxiliary)
    if model.server is None:
        raise CutError(f"{method.name} has no split server")
    aligned = auxiliary if method.aligned else None
    return SplitServer(model.server, attrs.evolve(settings, replicas=method.replicas), aligned)


@attrs.frozen
class Parts:
    """A cut model as a node needs it.

    architecture: what has to be the same at every node, in the order of comparison.

    features: shape of what the tail of a U-shape is given of one sample; empty for language models,
    whose samples differ in length.
    """

    model: CutModel
    auxiliary: nn.Module | None
    architecture: Mapping[str, str]
    features: tuple[int, ...] = ()


SPLIT_RATE = 1e-3


def optimizer_of(config: Config) -> OptimizerSpec:
    """Return the optimizer of either part."""
    chosen, train = config.split, config.train
    first, second = map(float, chosen.betas.split(","))
    schedule = Schedule(chosen.schedule, train.final_rate, chosen.warmup_steps)
    return OptimizerSpec(
        chosen.optimizer,
        train.learning_rate or SPLIT_RATE,
        weight_decay=train.weight_decay,
        momentum=chosen.momentum,
        betas=(first, second),
        rates=Rates(schedule, config.run.rounds, 1 - (train.decay_share or DECAY_SHARES["adamw"])),
    )


def client_options(config: Config, name: str = "", in_flight: int = 1) -> ClientPartOptions:
    """Return how client `name` trains its part, and an auxiliary model that is trained there."""
    chosen, optimizer = config.split, optimizer_of(config)
    auxiliary = attrs.evolve(
        optimizer,
        name=chosen.auxiliary_optimizer,
        learning_rate=chosen.auxiliary_rate or optimizer.learning_rate,
        weight_decay=chosen.auxiliary_decay,
    )
    return ClientPartOptions(
        optimizer, loss_of(config), config.run.seed, name, in_flight, auxiliary
    )


def loss_of(config: Config) -> Loss:
    """Return the loss of training: cross entropy with the run's label smoothing."""
    return functools.partial(cross_entropy, smoothing=config.split.label_smoothing)


def build_parts(config: Config, *, at_client: bool) -> Parts:
    """Cut the run's model.

    Of the built-in GPT a client builds the weights that it needs and no others; of any other model
    all, for a moment.

    Raises CutError for a cut that does not exist, AuxiliaryError, TaskError and ConfigError for
    sizes that do not fit.
    """
    facts, chosen, method = facts_of(config), config.split, method_of(config.split)
    aided = method.auxiliary != "none"
    pieces = _pieces(chosen.auxiliary) if aided else 0
    blocks = None
    if at_client and method.has_server and config.model.family == "gpt":
        # A wrong cut builds one block too many, and is then told by `split`.
        front = int(chosen.cut or 1) if (chosen.cut or "1").isdecimal() else 0
        blocks = range(min(front + pieces, models.gpt_sizes(config, facts).layers))
    whole = models.build_model(config, facts, blocks)
    if not method.has_server:
        model = in_one(whole)
        adapted(config, model, None)
        return Parts(model, None, {})
    cut = models.default_cut(config, whole)
    model = split(whole, cut, models.tail_cut(whole) if chosen.labels_at_home else None)
    assert model.server is not None
    for part in (model.client, model.server):
        if next(part.parameters(), None) is None:
            there = ", ".join(models.useful_cuts(whole))
            raise CutError(
                f"cut {model.cut!r} leaves no weights on one side;"
                f" cuts with weights on both: {there}"
            )
    extra = None
    if aided:
        seen = model
        rest = model.server
        if blocks is not None and isinstance(rest, GPTPart) and pieces <= len(rest.blocks):
            # the rest of the split server's part has no weights here, and the auxiliary model needs
            # none of them
            seen = CutModel(model.client, rest.first_blocks(pieces))
        extra = auxiliaries.build(
            chosen.auxiliary, seen, models.example(facts), seed=config.run.seed
        )
    found = _architecture(config, len(cuts_of(whole)), model, extra)
    features: tuple[int, ...] = ()
    if model.tail is not None and not facts.language:
        features = _through(facts, model.client, model.server)
    adapted(config, model, extra)
    if is_own(config.model.family) and chosen.lora_client:
        # They do not travel: a site with others would train another model.
        found["frozen weights"] = weights_of(model.client).manifest.fingerprint
    return Parts(model, extra, found, features)


def _pieces(kind: str) -> int:
    text = kind.removeprefix("blocks:")
    return int(text) if text != kind and text.isdecimal() else 0


def adapted(config: Config, model: CutModel, extra: nn.Module | None) -> None:
    """Add LoRA in place where the run has it.

    The auxiliary model is a client's; one that is linear alone trains whole.
    """
    chosen, seed = config.split, config.run.seed

    def adapt(part: nn.Module, rank: int) -> None:
        alpha, dropout = chosen.lora_alpha, chosen.lora_dropout
        apply_lora(part, rank=rank, alpha=alpha, dropout=dropout, seed=seed)

    if chosen.lora_client:
        adapt(model.client, chosen.lora_client)
        if extra is not None and _pieces(chosen.auxiliary):
            adapt(extra, chosen.lora_client)
        if model.tail is not None:
            model.tail.requires_grad_(requires_grad=False)
    if chosen.lora_server and model.server is not None:
        adapt(model.server, chosen.lora_server)


def _architecture(
    config: Config, places: int, model: CutModel, extra: nn.Module | None
) -> dict[str, str]:
    assert model.server is not None
    chosen = config.split
    found = {
        "method": chosen.method,
        "model": "the user's own" if is_own(config.model.family) else config.model.family,
        "cut": f"{model.cut} of {places} places",
        "labels": "at home" if model.tail is not None else "sent",
        "client part": weights_of(model.client).layout.fingerprint,
        "server part": weights_of(model.server).layout.fingerprint,
    }
    if extra is not None:
        found["auxiliary model"] = weights_of(extra).layout.fingerprint
    if chosen.lora_client or chosen.lora_server:
        found["LoRA ranks"] = (
            f"{chosen.lora_client} at clients, {chosen.lora_server} at the split server"
        )
    return found


def build_server(
    config: Config, device: torch.device
) -> tuple[SplitServer, Method, UploadShape, Parts]:
    """The split server of the run."""
    parts = build_parts(config, at_client=False)
    method, facts, chosen = method_of(config.split), facts_of(config), config.split
    align = AlignSettings(
        chosen.align_passes,
        chosen.buffer_samples,
        min(chosen.buffer_samples, chosen.align_batch or config.train.batch),
        OptimizerSpec("adam", chosen.align_rate),
    )
    uploads = _upload_shape(parts.model, facts)
    settings = ServerSettings(
        optimizer_of(config),
        loss_of(config),
        config.run.seed,
        align=align,
        shape=uploads.shape,
        classes=uploads.classes,
    )
    assert parts.model.server is not None
    parts.model.server.to(device)
    extra = None if parts.auxiliary is None else parts.auxiliary.to(device)
    return split_server(method, parts.model, settings, extra), method, uploads, parts


def _through(facts: Facts, *parts: nn.Module) -> tuple[int, ...]:
    """The shape of what comes of one sample behind these parts."""
    with torch.no_grad(), evaluating(*parts):
        values = models.example(facts).inputs
        for part in parts:
            values = call(part, values, None)
    return tuple(values.shape[1:])


def _upload_shape(model: CutModel, facts: Facts) -> UploadShape:
    """What uploads of the activations behind the client's part must look like."""
    shape = _through(facts, model.client)
    if not facts.language:
        return UploadShape(shape, facts.classes, per_token=False)
    return UploadShape((-1, *shape[1:]), facts.classes, per_token=True, longest=facts.shape[0])
