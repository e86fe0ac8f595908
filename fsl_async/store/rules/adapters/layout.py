"""The layout of adapters in a manifest: which tensors are factors of which module. Pure.

    <module>.lora_A    (rank, in)     absent where A is not exchanged
    <module>.lora_B    (rank, out)    B transposed; follows its lora_A
    <module>.patch     (out, in)      with some rules: an addition to the frozen weight
    any other name                    a tensor that is trained whole

A module computes x @ (W0 + patch).T + scale * (x @ lora_A.T) @ lora_B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from fsl_async.store.errors import ManifestError
from fsl_transport.text import peer_text

if TYPE_CHECKING:
    from fsl_async.store.model.manifest import Manifest, TensorSpec
    from fsl_async.store.rules.adapters.base import AdapterRule

A_SUFFIX, B_SUFFIX, PATCH_SUFFIX = ".lora_A", ".lora_B", ".patch"

_SHOWN = 80


@frozen
class Module:
    """An adapted linear layer. index: its place among the adapted modules, in manifest order."""

    name: str
    index: int
    a: TensorSpec | None
    b: TensorSpec
    patch: TensorSpec | None = None

    @property
    def rank(self) -> int:
        """Rows of each factor."""
        return self.b.shape[0]


@frozen
class AdapterLayout:
    """The tensors of a manifest. Both tuples are in its order."""

    modules: tuple[Module, ...]
    full: tuple[TensorSpec, ...]

    @property
    def rank(self) -> int:
        """Rank of all adapters."""
        return self.modules[0].rank


def adapter_modules(manifest: Manifest, rule: AdapterRule | None = None) -> AdapterLayout:
    """Parse a manifest into modules and tensors that are trained whole.

    rule: that the modules must suit. ManifestError names the first tensor that is wrong.
    """
    modules: dict[str, Module] = {}
    full: list[TensorSpec] = []
    before: TensorSpec | None = None
    for tensor in manifest.tensors:
        name = tensor.name
        if before is not None and name != _module_of(before.name, A_SUFFIX) + B_SUFFIX:
            raise ManifestError(f"tensor {_shown(before)} is not followed by its {B_SUFFIX}")
        if name.endswith(A_SUFFIX):
            _check_factor(tensor)
            before = tensor
            continue
        if name.endswith(B_SUFFIX):
            _check_factor(tensor, before)
            module = _module_of(name, B_SUFFIX)
            modules[module] = Module(module, len(modules), before, tensor)
            before = None
        elif name.endswith(PATCH_SUFFIX):
            module = _module_of(name, PATCH_SUFFIX)
            if module not in modules:
                raise ManifestError(f"tensor {_shown(tensor)} comes before factors of its module")
            modules[module] = _patched(modules[module], tensor)
        else:
            full.append(tensor)
    if before is not None:
        raise ManifestError(f"tensor {_shown(before)} is not followed by its {B_SUFFIX}")
    layout = AdapterLayout(tuple(modules.values()), tuple(full))
    _check(layout, rule)
    return layout


def has_adapters(manifest: Manifest) -> bool:
    """Whether a tensor is a factor of a run's adapter, by its name."""
    return any(one.name.endswith((A_SUFFIX, B_SUFFIX)) for one in manifest.tensors)


def _module_of(name: str, suffix: str) -> str:
    return name.removesuffix(suffix)


def _shown(tensor: TensorSpec) -> str:
    return f"'{peer_text(tensor.name, _SHOWN)}'"


def _size(tensor: TensorSpec) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def _check_factor(tensor: TensorSpec, other: TensorSpec | None = None) -> None:
    if len(tensor.shape) != 2 or not tensor.values:
        raise ManifestError(
            f"tensor {_shown(tensor)} is {_size(tensor)}; a factor has rank x features"
        )
    if other is not None and other.shape[0] != tensor.shape[0]:
        raise ManifestError(
            f"tensor {_shown(other)} has rank {other.shape[0]}, and {_shown(tensor)}"
            f" {tensor.shape[0]}"
        )


def _patched(module: Module, tensor: TensorSpec) -> Module:
    if module.a is None:
        raise ManifestError(f"tensor {_shown(tensor)}: its module has no {A_SUFFIX}")
    wanted = (module.b.shape[1], module.a.shape[1])
    if tensor.shape != wanted:
        raise ManifestError(
            f"tensor {_shown(tensor)} is {_size(tensor)}; its factors make {wanted[0]}x{wanted[1]}"
        )
    return evolve(module, patch=tensor)


def _check(layout: AdapterLayout, rule: AdapterRule | None) -> None:
    if not layout.modules:
        raise ManifestError(f"no tensor is an adapter: none is called <module>{B_SUFFIX}")
    for module in layout.modules:
        if module.rank != layout.rank:
            raise ManifestError(
                f"tensor {_shown(module.b)} has rank {module.rank}, and the first adapter"
                f" {layout.rank}; a run has one"
            )
        if rule is None:
            continue
        for suffix, is_there, is_wanted in (
            (A_SUFFIX, module.a is not None, rule.exchanges_a),
            (PATCH_SUFFIX, module.patch is not None, rule.has_patch),
        ):
            if is_there != is_wanted:
                what = "needs one" if is_wanted else "has none"
                there = "a" if is_there else "no"
                raise ManifestError(
                    f"module '{peer_text(module.name, _SHOWN)}' has {there} {suffix}, and rule"
                    f" {rule.name} {what}"
                )
