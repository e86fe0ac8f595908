"""Builds the parts of a run's model: the client's, the split server's, and the auxiliary model.

Every node builds its part from the run's configuration and seed (`models.families`), so nothing but
what a method sends crosses the network. `client_part` and `split_server` make the parts of a method
from any cut model.

`shapes_of` is for the planner (`fsl_async.plan`), which is arithmetic and has the shapes of two
families built in. Any other model is built on the CPU, cut, and sent a batch through: parameters,
buffers, sizes at the cuts, and what torch keeps of each part for the backward pass. (Torch's meta
device would need no memory, but keeps other things: its attention is not fused.)
"""

import functools
from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import Tensor, nn

from fsl_async.accounting.sizes import ModelShapes, Part, label_width
from fsl_async.config.presets import DECAY_SHARES
from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.data.facts import Facts, facts_of
from fsl_async.learn.models import families as models
from fsl_async.learn.models.adapters import apply_lora
from fsl_async.learn.models.cuts import CutError, CutModel, build_auxiliary, cuts_of, in_one, split
from fsl_async.learn.models.forward import Batch, call, evaluating
from fsl_async.learn.models.gpt import GPTPart
from fsl_async.learn.split.model_parts import (
    AlignSettings,
    ClientPart,
    ClientPartOptions,
    OptimizerSpec,
    Rates,
    ServerPartOptions,
)
from fsl_async.learn.split.server_training import SplitServer, UploadShape
from fsl_async.learn.split.smashed import Loss, cross_entropy
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
    settings: ServerPartOptions,
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
    schedule = Schedule(chosen.schedule, warmup_steps=chosen.warmup_steps)
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
    optimizer = optimizer_of(config)
    # As the code that was published with CSE-FSL.
    auxiliary = attrs.evolve(optimizer, name="adam", weight_decay=0.0)
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
        extra = build_auxiliary(chosen.auxiliary, seen, models.example(facts), seed=config.run.seed)
    found = _architecture(config, len(cuts_of(whole)), model, extra)
    features: tuple[int, ...] = ()
    if model.tail is not None and not facts.language:
        features = _through(facts, model.client, model.server)
    adapted(config, model, extra)
    if is_own(config.model.family) and chosen.lora_client:
        # They do not travel: a site with others would train another model.
        found["frozen weights"] = ModelWeights(model.client).manifest.fingerprint
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
        "client part": ModelWeights(model.client).layout.fingerprint,
        "server part": ModelWeights(model.server).layout.fingerprint,
    }
    if extra is not None:
        found["auxiliary model"] = ModelWeights(extra).layout.fingerprint
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
    settings = ServerPartOptions(
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
    """Return the shape of the output of these parts for one sample."""
    with torch.no_grad(), evaluating(*parts):
        values = models.example(facts).inputs
        for part in parts:
            values = call(part, values, None)
    return tuple(values.shape[1:])


def _upload_shape(model: CutModel, facts: Facts) -> UploadShape:
    """Return the shape that uploads of the activations behind the client's part must have."""
    shape = _through(facts, model.client)
    if not facts.language:
        return UploadShape(shape, facts.classes, per_token=False)
    return UploadShape((-1, *shape[1:]), facts.classes, per_token=True, longest=facts.shape[0])


BATCH = 2


def shapes_of(config: Config) -> ModelShapes:
    """The shapes of the run's model, cut where the run cuts it.

    Raises what `build.build_parts` does, each in one line.
    """
    facts = facts_of(config)
    model = models.build_model(config, facts)
    cut, end = models.default_cut(config, model), models.tail_cut(model)
    batch = _batch(models.example(facts))
    whole = in_one(model)
    adapted(config, whole, None)
    straight = split(models.build_model(config, facts), cut)
    extra = None
    if method_of(config.split).auxiliary != "none":
        extra = build_auxiliary(config.split.auxiliary, straight, batch)
    adapted(config, straight, extra)
    client, server = straight.client, straight.server
    assert server is not None
    with torch.no_grad():
        values = call(client, batch.inputs, None)
    parts = (
        counted([client], kept(client, batch.inputs, None)),
        counted([server], kept(server, values, batch.labels)),
    )
    bent, tail_values = Part(), 0
    if config.split.labels_at_home or straight.cut != end:  # else nothing lies between two cuts
        bent, tail_values = _bent(config, split(models.build_model(config, facts), cut, end), batch)
    return ModelShapes(
        name=config.model.family,
        cut=straight.cut,
        client=parts[0],
        server=parts[1],
        whole=counted([whole.client], kept(whole.client, batch.inputs, batch.labels)),
        auxiliary=Part() if extra is None else counted([extra], kept(extra, values, batch.labels)),
        tail=bent,
        cut_values=values[0].numel(),
        tail_values=tail_values,
        label_bytes=batch.labels[0].numel() * label_width(facts.classes),
    )


def _batch(example: Batch) -> Batch:
    """Return a batch of two samples: batch norm does not train on one."""
    return Batch(torch.cat([example.inputs] * BATCH), torch.cat([example.labels] * BATCH))


def _bent(config: Config, model: CutModel, batch: Batch) -> tuple[Part, int]:
    """Count what a U-shape adds to the client, and the values of one sample's features."""
    adapted(config, model, None)
    assert model.server is not None
    assert model.tail is not None
    with torch.no_grad():
        features = call(model.server, call(model.client, batch.inputs, None), None)
    first, both = counted([model.client]), counted([model.client, model.tail])
    added = Part(
        both.parameters - first.parameters,
        both.buffers - first.buffers,
        both.counters - first.counters,
        kept(model.tail, features, batch.labels),
        both.frozen - first.frozen,
    )
    return added, features[0].numel()


def kept(module: nn.Module, values: Tensor, labels: Tensor | None) -> int:
    """fp32 values that torch keeps of a sample's pass, each piece of memory once, weights aside."""
    own = {_memory(each) for each in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no memory is counted for another that took its place

    def keep(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if _memory(tensor) not in own:
            sizes[_memory(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    given = values.detach()
    if given.is_floating_point():
        given.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = call(module, given, None)
        if labels is not None:
            cross_entropy(found, labels)
    return round(sum(sizes.values()) / 4 / BATCH)


def counted(modules: Iterable[nn.Module], activations: int = 0) -> Part:
    """Count the values of some modules, each tensor once.

    Weights that train, buffers that travel, counters, and what is frozen.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for module in modules:
        trained = all(weight.requires_grad for weight in module.parameters())
        listed = module.state_dict(keep_vars=True)
        for tensor in listed.values():
            is_weight = isinstance(tensor, nn.Parameter)
            if is_weight and not trained and not tensor.requires_grad:
                kind = "frozen"
            elif is_weight:
                kind = "parameters"
            else:
                kind = "buffers" if tensor.is_floating_point() else "counters"
            found.setdefault(_memory(tensor), (kind, tensor))
    sums = {"parameters": 0, "buffers": 0, "counters": 0, "frozen": 0}
    for kind, tensor in found.values():
        sums[kind] += tensor.numel()
    return Part(**sums, activations=activations)


def _memory(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - data_ptr() is 0 for all of meta
    return found
