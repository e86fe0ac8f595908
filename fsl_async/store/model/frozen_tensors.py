"""Frozen tensors: what clients must hold alike and do not exchange, by name, form and digest. Pure.

A list of them is part of the manifest, so the parameter server can name the first tensor in which a
client differs, and what to do. Settings that tensors do not show are in it, too (`setting`).
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from fsl_async.store.errors import ManifestError
from fsl_transport.text import peer_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DIGEST_CHARACTERS = 16
MOST_LISTED = 2048
"""Entries of a manifest: a control message has at most 4 MiB. More tensors share entries."""
_NAME_CHARACTERS = 200

_FORM = re.compile(
    r"[a-z][a-z0-9_]{0,31} (scalar|[0-9]{1,13}(x[0-9]{1,13}){0,15})|setting [ -~]{1,200}"
)
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}")
_FLOATS = ("float", "bfloat", "complex")

_SAME_BASE = "load the same base model at every client"
_SAME_TYPE = "load the base model in the same dtype at every client"
_SAME_QUANTIZER = (
    "quantize the base model with the same quantizer and settings at every client, or at none"
)
_SAME_SETTINGS = "give the adapters the same settings at every client"
_SETTING = "setting "
_SETTING_CHARACTERS = 200
_OWN_PART = (
    f"{_SAME_BASE}; a head or an adapter of its own must train (requires_grad), and"
    " fed.attach(model, exchange=[...]) decides whether it is exchanged"
)


@frozen
class FrozenTensor:
    """One tensor, or neighbors in the order of names. Equal where name and digest are."""

    name: str
    form: str = field(eq=False)
    """Type and shape, such as "bfloat16 64x32"; of neighbors those of the first. Of a setting
    "setting" and its value."""
    digest: str
    """The first 16 hex characters of SHA-256 over name, shape and values, floats as fp32."""

    @property
    def is_quantized(self) -> bool:
        """Whether its values are no floating point numbers."""
        return not self.form.startswith((*_FLOATS, _SETTING))

    @property
    def is_setting(self) -> bool:
        """Whether it is a setting."""
        return self.form.startswith(_SETTING)

    @property
    def shown(self) -> str:
        """The value of a setting."""
        return self.form.removeprefix(_SETTING)


def form_of(dtype: str, shape: Sequence[int]) -> str:
    """Return the form of a tensor. dtype: "bfloat16" or "torch.bfloat16"."""
    return f"{dtype.removeprefix('torch.')} {'x'.join(map(str, shape)) or 'scalar'}"


def setting(name: str, value: str) -> FrozenTensor:
    """Return the entry of a setting. value: one line, shown in full where it is short."""
    shown = peer_text(value, _SETTING_CHARACTERS // 2).encode("ascii", "replace").decode()
    digest = hashlib.sha256(f"{name} {value}".encode()).hexdigest()[:DIGEST_CHARACTERS]
    return FrozenTensor(peer_text(name, _NAME_CHARACTERS), _SETTING + (shown or "none"), digest)


def frozen_tensors(
    found: Iterable[tuple[str, str, str]], settings: Sequence[FrozenTensor] = ()
) -> tuple[FrozenTensor, ...]:
    """Return (name, form, digest) and settings as sorted entries, at most MOST_LISTED."""
    tensors = [FrozenTensor(peer_text(one[0], _NAME_CHARACTERS), *one[1:]) for one in sorted(found)]
    size = -(-len(tensors) // (MOST_LISTED - len(settings)))
    if size > 1:
        groups = (tensors[at : at + size] for at in range(0, len(tensors), size))
        tensors = [_joined(group) for group in groups]
    return tuple(sorted((*tensors, *settings), key=lambda one: one.name))


def _joined(group: Sequence[FrozenTensor]) -> FrozenTensor:
    name = f"{group[0].name} ... {group[-1].name}" if len(group) > 1 else group[0].name
    digest = hashlib.sha256("".join(one.digest for one in group).encode()).hexdigest()
    return FrozenTensor(name, group[0].form, digest[:DIGEST_CHARACTERS])


def frozen_from_wire(wire: object) -> tuple[FrozenTensor, ...]:
    """Parse [[name, form, digest], ...] of an untrusted peer. Raises ManifestError."""
    if not isinstance(wire, list | tuple):
        raise ManifestError("the frozen tensors of a manifest must be a list")
    if len(wire) > MOST_LISTED:
        raise ManifestError(f"a manifest may list {MOST_LISTED} frozen tensors, not {len(wire)}")
    tensors = tuple(_entry(position, one) for position, one in enumerate(wire))
    if any(one.name >= after.name for one, after in pairwise(tensors)):
        raise ManifestError("the frozen tensors of a manifest must be sorted by name")
    return tensors


def _entry(position: int, wire: Any) -> FrozenTensor:
    match wire:
        case [str() as name, str() as form, str() as digest] if (
            1 <= len(name) <= 3 * _NAME_CHARACTERS
            and name.isprintable()
            and _FORM.fullmatch(form)
            and _DIGEST.fullmatch(digest)
        ):
            return FrozenTensor(name, form, digest)
    raise ManifestError(f"frozen tensor {position} of the manifest is not [name, form, digest]")


def _has_quantized(tensors: Iterable[FrozenTensor]) -> bool:
    return any(one.is_quantized for one in tensors)


def settings_difference(
    here: Iterable[FrozenTensor], there: Iterable[FrozenTensor], *, shared: bool = False
) -> str | None:
    """Return the first setting that differs and what to do as one sentence; None if none does.

    shared: compare those that both have.
    """
    mine, theirs = ({one.name: one for one in side if one.is_setting} for side in (here, there))
    for name in sorted(mine.keys() & theirs.keys() if shared else mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            values = [side[name].shown if name in side else "absent" for side in (mine, theirs)]
            return f"{name} is {values[0]} here and {values[1]} there: {_SAME_SETTINGS}"
    return None


def frozen_difference(
    here: tuple[FrozenTensor, ...], there: tuple[FrozenTensor, ...]
) -> str | None:
    """Return the first difference and what to do as one sentence; None if both are equal."""
    if here == there:
        return None
    mine, theirs = ({one.name: one for one in side} for side in (here, there))
    problem = settings_difference(here, there)
    if problem is not None:
        return problem
    for side, others, where in ((here, theirs, "here"), (there, mine, "there")):
        for one in side:
            if one.name not in others:
                is_other = _has_quantized(here) != _has_quantized(there)
                advice = _SAME_QUANTIZER if one.is_quantized or is_other else _OWN_PART
                return f"frozen tensor {one.name!r} ({one.form}) exists only {where}: {advice}"
    differing = [one for one in here if one != theirs[one.name]]
    first = differing[0]
    other = theirs[first.name]
    if first.is_quantized or other.is_quantized:
        advice = _SAME_QUANTIZER
    elif first.form.split()[0] != other.form.split()[0]:
        advice = _SAME_TYPE
    else:
        advice = _OWN_PART if 2 * len(differing) <= len(here) else _SAME_BASE
    if first.form != other.form:
        what = f"is {first.form} here and {other.form} there"
    else:
        what = f"({first.form}) has digest {first.digest} here and {other.digest} there"
    return f"frozen tensor {first.name!r} {what} ({len(differing)} of {len(here)} differ): {advice}"
