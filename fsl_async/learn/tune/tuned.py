"""A base model with the adapters of a run in it, moved onto versions; and merged with them."""

from pathlib import Path

import torch
from torch import nn

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.models.adapters import Adapters
from fsl_async.learn.models.quantized import dense_layer, dequantize
from fsl_async.learn.models.saving import merged_weight, plain_layer
from fsl_async.learn.tune.base import Base, load_base
from fsl_async.store.adapters import adapter_rule_named
from fsl_async.store.manifest import Manifest


class Tuned:
    """The base in a folder or GGUF file, with a run's adapters of the full rank.

    tune, seed: the run's; manifest: its exchanged tensors. Raises ConfigError in one line: the base
    cannot be loaded, or is another one than the run's.
    """

    def __init__(self, path: Path, tune: TuneConfig, seed: int, manifest: Manifest) -> None:
        self.tune = tune
        self.base: Base = load_base(path, tune.objective, labels=tune.label_names, seed=seed)
        self.model = self.base.model
        rule = adapter_rule_named(tune.rule)
        self.adapters = Adapters(self.model, tune, rule, seed=seed, heads=self.base.drawn)
        self._weights = ModelWeights(self.model, self.adapters.view)
        self._check(path, manifest)

    def load(self, vector: Vector) -> None:
        """Move the model onto a version. vector: float32, (manifest.values,)."""
        self._weights.copy_in(vector)

    def merge(self) -> Base:
        """Add adapters and patches to the weights, and take them out of the model.

        Returns the base, with plain layers again, dequantized; `load` must not be called
        afterwards.
        """
        with torch.no_grad():
            for name, layer in self.adapters.layers.items():
                merged, linear = merged_weight(layer), dense_layer(plain_layer(layer))
                linear.weight.copy_(merged)  # type: ignore[operator]
                self.model.set_submodule(name, linear)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        dequantize(self.model)
        return self.base

    def _check(self, path: Path, manifest: Manifest) -> None:
        """Raise ConfigError unless the base is the run's."""
        mine = self._weights.manifest
        if mine.tensors == manifest.tensors and mine.frozen != manifest.frozen:
            # Sites may hold the base in bf16, on CUDA.
            _round(self.model)
            mine = ModelWeights(self.model, self.adapters.view).manifest
            if mine.frozen != manifest.frozen:
                has_packed = [any(one.is_quantized for one in of.frozen) for of in (mine, manifest)]
                kinds = ("is not quantized", "is quantized")
                what = "has other weights than the run's base"
                if has_packed[0] != has_packed[1]:
                    here, there = (kinds[one] for one in has_packed)
                    what = f"{here}, and the run's base {there}"
                raise ConfigError(
                    f"base {str(path)!r} {what}: give the one that its clients have, as"
                    " save_pretrained writes it there"
                )
        if mine.tensors != manifest.tensors:
            raise ConfigError(
                f"base {str(path)!r} is another model than the run's base:"
                f" {mine.difference(manifest)}"
            )


def _round(model: nn.Module) -> None:
    """Round the base's weights to bf16, in place."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" not in name and weight.is_floating_point():
                weight.copy_(weight.bfloat16())
