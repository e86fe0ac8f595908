"""Which tensors of a model are exchanged, where they are not its parameters one by one.

`adapter_settings` has what peft's tensors do not show, such as `lora_alpha`. Two clients whose
adapters have the same names and shapes and another alpha compute different functions from the same
weights. These settings are part of the manifest, so the parameter server refuses the second one.
The run's own adapters (`fed.lora`) have none: their scale is the run's.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from attrs import frozen
from torch import nn

from fsl_async.store.model.frozen_tensors import FrozenTensor, setting


@frozen
class Part:
    """A tensor of the module, by name, or its transpose."""

    name: str
    is_transposed: bool = False


@frozen
class Exchanged:
    """A tensor of the manifest: tensors of the module, joined along their first dimension."""

    name: str
    parts: tuple[Part, ...]


@frozen
class View:
    """The exchanged tensors, in flat order.

    checks_frozen: whether the values of all others must be the same at all clients.
    """

    tensors: tuple[Exchanged, ...]
    checks_frozen: bool = True


_FIELDS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "rank_pattern",
    "alpha_pattern", "modules_to_save",
)  # fmt: skip
"""Fields of a peft config that are compared. Dropout and initialization may differ."""


def adapter_settings(module: nn.Module, exchanged: Collection[str]) -> tuple[FrozenTensor, ...]:
    """Return the settings of the adapters of which a tensor is exchanged, by name.

    exchanged: names of tensors. Which layers have adapters is among them, as `target_modules`.
    """
    configs: Mapping[str, Any] = next(
        (found for part in module.modules() if (found := getattr(part, "peft_config", None))), {}
    )
    return tuple(
        setting(f"adapter {name}: {field}", text)
        for name, config in configs.items()
        if any(f".{name}." in f"{tensor}." for tensor in exchanged)
        for field, text in _settings(config, exchanged)
    )


def _settings(config: Any, exchanged: Collection[str]) -> Iterator[tuple[str, str]]:
    for field in _FIELDS:
        if hasattr(config, field):
            yield field, _text(getattr(config, field))
    layers = {one.partition(".lora_")[0] for one in exchanged if ".lora_" in one}
    yield "target_modules", _text({layer.rpartition(".")[2] for layer in layers})


def _text(value: Any) -> str:
    """A value as one line: equal values have equal texts, whatever collection holds them."""
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(one)}" for key, one in sorted(value.items())) or "none"
    if isinstance(value, set | list | tuple):
        return ", ".join(sorted(map(str, value))) or "none"
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)
