"""A new head that stays at its site (`tune.head = home`): it trains there, and is on disk there.

A body is shared and each site has a head of its own, as in FedRep (Collins et al.,
arXiv:2102.07078): sites that disagree about what is good still learn one body.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fsl_async.errors import ConfigError
from fsl_async.files.files import make_folder, replace_bytes

SUFFIX = ".head.npz"


def load_head(model: nn.Module, names: Sequence[str], path: Path) -> None:
    """Take the weights of a kept head. Raises ConfigError in one line."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
            kept = {name: torch.from_numpy(found[name]) for name in names}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ConfigError(f"{str(path)!r} holds no head of this run's model ({error})") from None
    weights = {name: model.get_parameter(name) for name in names}
    for name, weight in weights.items():
        if kept[name].shape != weight.shape or kept[name].dtype != torch.float32:
            raise ConfigError(f"{str(path)!r} holds a head of another model: {name} differs")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(kept[name])


def save_head(model: nn.Module, names: Sequence[str], path: Path) -> None:
    """Keep the weights of a head, for a client that is launched again and for `export`."""
    packed = io.BytesIO()
    weights = {name: model.get_parameter(name).detach().cpu().numpy() for name in names}
    np.savez(packed, allow_pickle=False, **weights)
    make_folder(path.parent)
    replace_bytes(path, packed.getvalue())
