"""Writes a PEFT folder: adapter_config.json and adapter_model.safetensors. NumPy only: no torch.

`fsl-node export` and `save_pretrained` of an adapted model (`fsl_async.learn.models.saving`) name
adapters here. Format: https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fsl_async.files.files import Files
from fsl_async.learn.models.targets import HEADS
from fsl_async.store.disk.chunk_files import header_for
from fsl_async.store.model.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Tensors = Mapping[str, NDArray[np.float32]]
    Factors = tuple[NDArray[np.float32], NDArray[np.float32]]

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
CAUSAL_LM, SEQ_CLS = "CAUSAL_LM", "SEQ_CLS"
"""Task types of peft."""

_PREFIX = "base_model.model."
"""In front of every name in a PEFT folder."""
PEFT_HEADS = ("classifier", "score")
"""Modules that peft itself saves whole where the task is SEQ_CLS."""
_CONV1D = (".c_attn", ".c_proj", ".c_fc")
"""Layers of GPT-2, which keeps weights transposed. peft looks again and corrects a wrong guess."""


def write_adapters(
    folder: Path,
    factors: Mapping[str, Factors],
    full: Tensors,
    *,
    trunk: str,
    rank: int,
    scale: float,
    task: str | None,
    base: str | None,
) -> None:
    """Write adapters of one rank, float32.

    factors: A (rank, in) and B (out, rank) of each adapted layer. full: weights that train whole,
    by name. trunk: name of the module that all models of the base's family share, or "". scale: of
    the product B A; lora_alpha = scale * rank. task: CAUSAL_LM, SEQ_CLS or None. base: the base's
    folder or name. Raises OSError.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, (a, b) in factors.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
    tensors |= {_PREFIX + name: one for name, one in full.items()}
    write_tensors(folder / ADAPTER_WEIGHTS, tensors)
    targets, modules = list(factors), dict.fromkeys(saved_module(name, trunk) for name in full)
    if task == SEQ_CLS and not any(name in modules for name in PEFT_HEADS):
        task = None  # with it peft saves its heads whole, also where the run does not
    alpha = scale * rank
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "modules_to_save": list(modules) or None,
        "fan_in_fan_out": all(name.endswith(_CONV1D) for name in targets),
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, config)


def saved_module(name: str, trunk: str) -> str:
    """Return the module that peft saves whole for a weight: of a head all of it."""
    first = name.partition(".")[0]
    is_apart = first != trunk if trunk else first in HEADS
    return first if is_apart else name.rpartition(".")[0]


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file in fp32."""
    manifest = Manifest.from_shapes((name, one.shape) for name, one in tensors.items())
    with path.open("wb") as file:
        file.write(header_for(manifest))
        for one in tensors.values():
            file.write(np.ascontiguousarray(one, "<f4").data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as people read it."""
    Files().write_whole(path, (json.dumps(value, indent=2) + "\n").encode())
