"""Saves a model with the run's adapters so that programs without fsl-async load the same function.

    model.state_dict()              names, shapes and dtypes of the base; adapted weights are merged
    model.save_pretrained(folder)   a PEFT folder, of models of transformers

Adapters of this package are two to a layer, SITE and TAIL, and peft's names for them are of no use
elsewhere. So a hook on each adapted layer replaces its entries in every `state_dict()` by one
merged weight. Such values cannot be loaded back into adapters: `load_state_dict` refuses them.
This package reads tensors under the names that modules hold them by (`held_state`).

A folder has the adapters alone where PEFT can express the function, and all weights merged where it
cannot: rules that change the base, and weights that train whole but are part of a module, or tied.
A base that is in no folder is written beside its adapters, as `base/`.
"""

import json
from contextvars import ContextVar
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsl_async.errors import TaskError
from fsl_async.learn.models.adapters import Adapters, Patched, adapters_off, trunk_of
from fsl_async.learn.models.hf import dense_weight, is_quantized
from fsl_async.learn.models.peft_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CAUSAL_LM,
    SEQ_CLS,
    saved_module,
    write_adapters,
)

BASE, CONFIG = "base", "config.json"
_TASKS = {"ForCausalLM": CAUSAL_LM, "LMHeadModel": CAUSAL_LM, "ForSequenceClassification": SEQ_CLS}
"""Task types of peft, by the end of a class's name."""
_holds: ContextVar[bool] = ContextVar("holds", default=False)
"""Whether `state_dict` gives tensors under the names that modules hold them by."""


def held_state(module: nn.Module) -> dict[str, Any]:
    """Return `module.state_dict(keep_vars=True)`, with adapters and bases apart."""
    token = _holds.set(True)
    try:
        return module.state_dict(keep_vars=True)
    finally:
        _holds.reset(token)


def plain_layer(layer: Any) -> Any:
    """Return the base's own layer below the adapters."""
    inner = layer.base_layer
    return inner.base if isinstance(inner, Patched) else inner


def merged_weight(layer: Any) -> Tensor:
    """Return W + patch + scale B A of an adapted layer, in the base weight's layout and dtype.

    Of a quantized base: dequantized, fp32 (out, in). Without B A where adapters are disabled.
    """
    linear = plain_layer(layer)
    weight = dense_weight(linear)
    with torch.no_grad():
        merged = weight.float()
        changes = [layer.base_layer.patch] if isinstance(layer.base_layer, Patched) else []
        if not layer.disable_adapters:
            changes += [
                layer.scaling[name] * (layer.lora_B[name].weight @ layer.lora_A[name].weight)
                for name in layer.active_adapters
            ]
        for change in changes:
            # Conv1D keeps its weight transposed.
            merged = merged + (change.t() if type(linear).__name__ == "Conv1D" else change)
        return merged.to(weight.dtype)


def save_as_base(adapters: Adapters) -> None:
    """Have `state_dict` and `save_pretrained` of an adapted model save what others can load."""
    model: Any = adapters.model
    around = {""}  # names of modules in which something is adapted: loaded before it
    for name, layer in adapters.layers.items():
        layer.register_state_dict_post_hook(_merge)
        parts = name.split(".")
        around |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    for name in around:
        model.get_submodule(name).register_load_state_dict_pre_hook(_refuse)
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = SavePretrained(adapters)


def _merge(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the entries of a layer, which are the last ones, by those of its base."""
    if _holds.get():
        return
    if is_quantized(plain_layer(layer)):
        raise TaskError(
            "state_dict: the base's weights are quantized, and adapters cannot be added to them:"
            " save the adapters alone, with model.save_pretrained(folder)"
        )
    names = list(takewhile(lambda name: name.startswith(prefix), reversed(state)))
    entries = {name: state.pop(name) for name in reversed(names)}
    inner = "base_layer.base." if isinstance(layer.base_layer, Patched) else "base_layer."
    for name, value in entries.items():
        if name.startswith(prefix + inner):
            state[prefix + name.removeprefix(prefix + inner)] = value
    state[f"{prefix}weight"] = merged_weight(layer)
    metadata = getattr(state, "_metadata", {})
    for name in [name for name in metadata if name.startswith(prefix)]:
        del metadata[name]


def _refuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise TaskError for the state of a model without adapters, which would not be loaded."""
    for name, part in module.named_modules():
        inside = f"{prefix}{name}." if name else prefix
        if hasattr(part, "lora_A") and f"{inside}weight" in state:
            raise TaskError(
                f"load_state_dict: {inside}weight is merged or of the base alone, and the model has"
                " adapters there now: load it before fed.lora, or into a model without adapters"
            )


class SavePretrained:
    """The method `save_pretrained` of one adapted model of transformers."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._model: Any = adapters.model

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Write a PEFT folder, or all weights merged where that cannot hold the function.

        Also merged: with a `state_dict`, in a folder that has a whole model, which would be loaded
        below the adapters, and with push_to_hub. options: of transformers' `save_pretrained`.
        """
        folder = Path(save_directory)
        is_whole = (folder / CONFIG).is_file() or options.get("push_to_hub")
        if state_dict is None and not is_whole and self._fits_peft():
            if is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
                self._write_adapters(folder, options)
            return
        if any(is_quantized(plain_layer(layer)) for layer in self._adapters.layers.values()):
            raise TaskError(
                "save_pretrained: the base's weights are quantized, so that only adapters can be"
                " saved: give a folder without a model, and no state_dict; where tune.rule changes"
                " the base (fedex, flora), use fsl-node export --merged"
            )
        if is_main_process:
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):  # of another save
                (folder / name).unlink(missing_ok=True)
        self._save_whole(folder, is_main_process=is_main_process, state_dict=state_dict, **options)

    def _save_whole(self, folder: Path, **options: Any) -> None:
        type(self._model).save_pretrained(self._model, str(folder), **options)

    def _fits_peft(self) -> bool:
        """Whether adapters and whole modules are all that differs from the base."""
        adapters, full = self._adapters, set(self._adapters.full)
        if adapters.rule.has_patch or not adapters.layers:
            return False
        modules = {saved_module(name, trunk_of(self._model)) for name in full}
        inside = tuple(f"{name}." for name in modules)
        trained = {id(self._model.get_parameter(name)) for name in full}
        is_more = any(
            id(weight) in trained or name.startswith(inside)
            for name, weight in self._model.named_parameters(remove_duplicate=False)
            if name not in full
        )
        # peft also takes pre_classifier for classifier.
        return not is_more and not any(
            name.endswith(tuple(modules)) and name not in modules
            for name, _ in self._model.named_modules()
            if not name.startswith(inside)
        )

    def _write_adapters(self, folder: Path, options: dict[str, Any]) -> None:
        layers, model = self._adapters.layers, self._model
        factors = {}
        for name, layer in layers.items():
            parts = [(layer.lora_A[one].weight, layer.lora_B[one].weight) for one in layer.lora_A]
            active = parts[: len(layer.active_adapters)]
            a = torch.cat([one for one, _ in active])
            b = torch.cat([one for _, one in active], dim=1)
            factors[name] = _array(a), _array(b)
        task = next(
            (task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None
        )
        base = self._base_folder()
        if base is None:
            base = str(folder.resolve() / BASE)
            with adapters_off(model):
                self._save_whole(folder / BASE, **options)
        write_adapters(
            folder,
            factors,
            {name: _array(model.get_parameter(name)) for name in self._adapters.full},
            trunk=trunk_of(model),
            rank=len(next(iter(factors.values()))[0]),
            scale=self._adapters.scale,
            task=task,
            base=base,
        )

    def _base_folder(self) -> str | None:
        """The folder or name that the base was loaded from; None: it is there no more, or other."""
        found = str(getattr(self._model.config, "_name_or_path", ""))
        if not found or not Path(found).is_dir():
            return found or None  # a name on a hub
        try:
            config = json.loads((Path(found) / CONFIG).read_text())
        except (OSError, ValueError):  # such as GGUF files
            return None
        size = getattr(self._model.config, "vocab_size", None)
        is_same = size is None or config.get("vocab_size", size) == size  # else: resized
        return str(Path(found).resolve()) if is_same else None


def _array(weight: Tensor) -> Any:
    return weight.detach().float().cpu().numpy()
