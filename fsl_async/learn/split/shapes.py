"""The shapes of any model that can be cut, for the planner: parts are counted, a batch is measured.

`fsl_async.plan` is arithmetic and has the shapes of two families built in. Any other model is
built on the CPU, cut, and sent a batch through: parameters, buffers, sizes at the cuts, and what
torch keeps of each part for the backward pass. (Torch's meta device would need no memory, but keeps
other things: its attention is not fused.)
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fsl_async.accounting.sizes import ModelShapes, Part, label_width
from fsl_async.config.settings import Config
from fsl_async.learn.data.facts import facts_of
from fsl_async.learn.models import auxiliary as auxiliaries
from fsl_async.learn.models import families as models
from fsl_async.learn.models.cuts import CutModel, in_one, split
from fsl_async.learn.models.forward import Batch, call
from fsl_async.learn.split.build import adapted
from fsl_async.learn.split.smashed import cross_entropy
from fsl_async.roles.split.methods import method_of

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
        extra = auxiliaries.build(config.split.auxiliary, straight, batch)
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
    """Of two samples: batch norm does not train on one."""
    return Batch(torch.cat([example.inputs] * BATCH), torch.cat([example.labels] * BATCH))


def _bent(config: Config, model: CutModel, batch: Batch) -> tuple[Part, int]:
    """What a U-shape adds to the client, and the values of one sample's features."""
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
    """What there is in some modules, each tensor once.

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
