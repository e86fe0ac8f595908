"""Writes a version of a run as a folder that other programs load. NumPy only: no torch.

    adapters    PEFT: adapter_config.json, adapter_model.safetensors
    merged      Hugging Face: the base with adapters in its weights (fsl_async.learn.tune.base)
    model       Hugging Face: a model that was trained whole; the built-in GPT is Arcee's
                architecture there, with a tokenizer of bytes
    tensors     model.safetensors alone: any other model

Each has fsl_export.json beside it: kind, version, digest, tokens, and names and shapes of tensors.

The built-in GPT computes what `ArceeForCausalLM` of transformers does: Llama with squared ReLU and
without gates. Its fused queries, keys and values are written apart; nothing else changes.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsl_async.config.settings_tuning import HEADS
from fsl_async.errors import RunDirError, TaskError, UsageError
from fsl_async.files.files import make_folder
from fsl_async.learn.data.counter import first_a
from fsl_async.learn.models import peft_folder
from fsl_async.learn.models.peft_folder import CAUSAL_LM, SEQ_CLS, write_json, write_tensors
from fsl_async.learn.models.targets import is_head
from fsl_async.store.errors import ManifestError
from fsl_async.store.rules.adapters import adapter_modules, adapter_rule_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.config.settings_tuning import TuneConfig
    from fsl_async.learn.models.gpt import GPTConfig
    from fsl_async.learn.tune.base_files import BaseFacts
    from fsl_async.store.rules.adapters import AdapterLayout
    from fsl_async.tools.kept_run import KeptRun, Loaded

    Tensors = Mapping[str, NDArray[np.float32]]

NOTE = "fsl_export.json"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def check_out_dir(out_dir: Path) -> None:
    """Raise UsageError unless the folder is new or empty."""
    if out_dir.is_dir():
        if any(out_dir.iterdir()):
            raise UsageError(f"{out_dir} is not empty: give a new folder")
    elif out_dir.exists() or out_dir.is_symlink():
        raise UsageError(f"{out_dir} exists and is no folder: give a new one")


@contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a folder beside `out_dir`, which becomes it when the block ends without an error.

    Raises UsageError where `out_dir` has files in it, before or after the block; OSError.
    """
    check_out_dir(out_dir)
    made = out_dir.resolve()
    make_folder(made.parent)
    part = made.with_name(f".{made.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    make_folder(part, exist_ok=False)
    try:
        yield part
        try:
            part.rename(made)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise UsageError(f"{out_dir} is not empty any more: give a new folder") from None
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_note(folder: Path, run: KeptRun, loaded: Loaded, kind: str, **more: Any) -> None:
    """Write what was exported, and from which version."""
    record = loaded.record
    note = {
        "kind": kind,
        "version": record.version,
        "digest": record.digest,
        "tokens": record.tokens_total,
        **more,
        "tensors": {one.name: list(one.shape) for one in run.manifest.tensors},
    }
    write_json(folder / NOTE, note)


def adapter_layout(run: KeptRun) -> AdapterLayout:
    """The run's adapters. RunDirError: it has none."""
    try:
        return adapter_modules(run.manifest)
    except ManifestError as error:
        if any(".lora_A." in one.name for one in run.manifest.tensors):
            raise RunDirError(
                f"{run.run_dir}: its adapters are those of a script (peft), not the run's: save"
                " them in the script"
            ) from None
        raise RunDirError(f"{run.run_dir}: {error}: export it with --merged") from None


def write_adapters(
    folder: Path,
    run: KeptRun,
    loaded: Loaded,
    *,
    facts: BaseFacts | None = None,
    base: str | None = None,
) -> None:
    """Write a PEFT folder. scaling = lora_alpha / r = tune.scale.

    facts: of the base, for rules that do not exchange A, and to check modules that train whole;
    base: the path in the config. Raises UsageError: the rule changes the base, or `facts` are
    needed; TaskError: another base, or modules that PEFT cannot hold; RunDirError.
    """
    tune, layout = run.tuning(), adapter_layout(run)
    rule = adapter_rule_named(tune.rule)
    if rule.has_patch:
        raise UsageError(
            f"{tune.rule} changes the base's own weights, which adapters cannot hold: give --merged"
            " and --base"
        )
    if not rule.exchanges_a and facts is None:
        raise UsageError(f"{tune.rule} never sends factors A: give --base, for their sizes")
    if tune.full and facts is None:
        raise UsageError("this run trains whole modules (tune.full): give --base, to check them")
    inputs = {} if facts is None else {layer.name: layer.inputs for layer in facts.linear}
    seed = int(run.settings()["run"]["seed"])
    named, factors = run.named(loaded), {}
    for module in layout.modules:
        if module.a is not None:
            a = named[module.a.name]
        elif module.name in inputs:
            a = first_a(seed, module.name, layout.rank, inputs[module.name])
        else:
            raise TaskError(f"this base has no linear layer {module.name}: it is another model")
        factors[module.name] = a, named[module.b.name].T
    names = [one.name for one in layout.full]
    # A layer with adapters is in the trunk.
    trunk = layout.modules[0].name.split(".")[0] if layout.modules else ""
    if facts is not None:
        trunk = facts.trunk
        _check_whole(names, tune, facts)
    peft_folder.write_adapters(
        folder,
        factors,
        {name: named[name] for name in names},
        trunk=trunk,
        rank=layout.rank,
        scale=tune.scale,
        task=_task_of(tune, names, trunk),
        base=base,
    )
    write_note(folder, run, loaded, "adapters", rule=tune.rule, objective=tune.objective)


def _task_of(tune: TuneConfig, names: Sequence[str], trunk: str) -> str | None:
    """Return peft's task type. A script's model may have new heads whatever the run's objective."""
    heads = {name.partition(".")[0] for name in names if is_head(name, trunk)}
    if tune.objective in HEADS or heads.intersection(peft_folder.PEFT_HEADS):
        return SEQ_CLS
    return None if heads - {"lm_head", "embed_out"} else CAUSAL_LM


def _check_whole(names: Sequence[str], tune: TuneConfig, facts: BaseFacts) -> None:
    """Raise TaskError where PEFT would load something else than what was trained.

    It holds whole modules, and takes an embedding apart from the output layer that shares it.
    """
    trunk = facts.trunk
    modules = {peft_folder.saved_module(name, trunk) for name in names}
    has_head = any(is_head(name, trunk) for name in facts.shapes)
    is_tied = tune.objective not in HEADS and not has_head
    for name, shape in facts.shapes.items():
        module = peft_folder.saved_module(name, trunk)
        if name not in names and module in modules:
            problem = f"tune.full trains a part of {module}, without {name}"
        elif name in names and is_tied and shape[0] == facts.config.get("vocab_size"):
            problem = f"{name}, which tune.full trains, is the output layer too"
        else:
            continue
        raise TaskError(f"{problem}: a PEFT folder cannot hold that; give --merged")


def write_gpt(folder: Path, run: KeptRun, loaded: Loaded, sizes: GPTConfig) -> None:
    """Write the built-in GPT as a Hugging Face folder with a tokenizer of bytes."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, one in run.named(loaded).items():
        block = name.rpartition(".attention_in.weight")[0]
        if block:
            for part, rows in zip("qkv", np.split(one, 3), strict=True):
                tensors[f"{_gpt_name(block)}.self_attn.{part}_proj.weight"] = rows
        else:
            tensors[_gpt_name(name)] = one
    write_tensors(folder / WEIGHTS, tensors)
    write_json(folder / CONFIG, _gpt_config(sizes))
    if sizes.vocabulary == len(_BYTES):
        write_json(folder / "tokenizer.json", _byte_tokenizer())
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": sizes.context,
                "clean_up_tokenization_spaces": False,
            },
        )
    write_note(folder, run, loaded, "model", family="gpt")


_GPT_NAMES = {
    "embedding": "embed_tokens.weight",
    "blocks": "layers",
    "attention_norm": "input_layernorm",
    "attention_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp_in": "mlp.up_proj",
    "mlp_out": "mlp.down_proj",
}


def _gpt_name(name: str) -> str:
    """Arcee's name for a weight or block of the built-in GPT."""
    return "model." + ".".join(_GPT_NAMES.get(part, part) for part in name.split("."))


def _gpt_config(sizes: GPTConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": 4 * sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "head_dim": sizes.width // sizes.heads,
        "hidden_act": "relu2",
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }


def _byte_characters() -> list[str]:
    """The character for each byte in tokenizers of bytes, as GPT-2 has them.

    Printable bytes stand for themselves; the others, in order, for U+0100 and on.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


_BYTES = _byte_characters()


def _byte_tokenizer() -> dict[str, Any]:
    """A tokenizer of the tokenizers library: a token for each byte, its id the byte."""
    of_bytes = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": of_bytes,
        "post_processor": None,
        "decoder": of_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_BYTES)},
            "merges": [],
        },
    }


def write_plain(
    folder: Path, run: KeptRun, loaded: Loaded, tensors: Tensors | None = None, **more: Any
) -> None:
    """Write the tensors by name. tensors: instead of those of the version."""
    write_tensors(folder / WEIGHTS, run.named(loaded) if tensors is None else tensors)
    write_note(folder, run, loaded, "tensors", **more)
