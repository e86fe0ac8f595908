"""Loads the base model and its tokenizer from files on this machine, by transformers.

Nothing is downloaded, unpickled, or run from the model's folder. Weights are fp32, or bf16 on CUDA
where that is asked for. A new classification head is drawn from the run's seed by integer
arithmetic (`fsl_async.learn.data.counter`), so that all sites have the same one to the bit,
whatever their versions of torch and transformers.
"""

import importlib.util
import io
import logging
import re
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TextIO

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from fsl_async.config.settings_tuning import HEADS, Objective, TuneConfig
from fsl_async.errors import ConfigError, UsageError, one_line, to_install
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.data.counter import random_words
from fsl_async.learn.models.adapters import Adapters, heads_of, to_fp32
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.models.hf import (
    collector_paused,
    dense_layer,
    dequantize,
    dtype_argument,
    extra,
)
from fsl_async.learn.models.own_head import SUFFIX, load_head
from fsl_async.learn.models.saving import merged_weight, plain_layer
from fsl_async.learn.tune.base_files import (
    TOKENIZERS,
    BaseFacts,
    base_facts,
    checked_folder,
    weight_files,
)
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import adapter_rule_named
from fsl_async.store.vectors.memory import available_bytes

HEAD_STD = 0.02
"""Standard deviation of a new head's weights, as of BERT, where the config names none."""

_TRUNK = re.compile(r"\.\d+\.|embed|wte|wpe")
"""In names of weights that no new head has: of blocks and embeddings."""
_GGUF_MAGIC = b"GGUF"


@attrs.frozen(slots=True, eq=False)
class Base:
    """A base model in evaluation mode, on the CPU unless a device was given.

    tokenizer: of transformers. drawn: names of weights that were not in the files and follow from
    the seed: a new classification head, to be trained whole. context: most tokens of a sequence
    that the model has positions for; 0: it states none.
    """

    model: nn.Module
    tokenizer: Any
    drawn: tuple[str, ...]
    context: int


def load_base(
    path: str | Path,
    objective: Objective,
    *,
    labels: Sequence[str] = (),
    seed: int = 0,
    device: torch.device | None = None,
    bf16: bool = False,
) -> Base:
    """Load a base: a Hugging Face folder, a GGUF file (extra `gguf`), or a folder with one.

    labels: names of the outputs of a head that the model has. A head of that size in the folder is
    kept. A folder whose weights bitsandbytes has packed is loaded as it
    is (extra `quantized`).
    bf16: weights in bf16, for a frozen base on CUDA; what the folder lacks is in fp32.
    Raises ConfigError in one line: no such folder, no config.json, pickled weights only, weights or
    tokenizer missing or damaged, an extra not installed, too little memory.
    """
    if bf16 and (device is None or device.type != "cuda"):
        raise ConfigError("a base in bf16 needs a CUDA device: leave bf16 out")
    dtype = torch.bfloat16 if bf16 else torch.float32
    transformers = extra("transformers")
    gguf = _gguf_file(path)
    root = checked_folder(path) if gguf is None else gguf
    is_quantized = False
    if gguf is None:
        weight_files(root)
        facts = base_facts(root)
        is_quantized = _check_quantizer(root, facts)
        _check_memory(root, facts.bytes_at(2 if bf16 else 4))
    elif importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"base {str(gguf)!r} is a GGUF file: {to_install('hf,gguf')}")
    tokenizer = load_tokenizer(path)
    with quiet(), _one_line(root), collector_paused():
        load = _from_folder if gguf is None else _from_gguf
        place: dict[str, Any] = {**dtype_argument(dtype)}
        if is_quantized and device is not None and device.type != "cpu":
            place["device_map"] = {"": device}  # packed weights are not moved afterwards
        model, missing = load(transformers, root, objective, labels, place)
    _check_missing(root, missing, objective)
    to_fp32(model, missing)  # with the same bits at all sites, and they train whole
    state = model.state_dict()
    with torch.no_grad():
        for name in missing:
            _draw(state[name], name, seed, getattr(model.config, "initializer_range", HEAD_STD))
    if objective in HEADS and model.config.pad_token_id is None:
        # Decoders look for the last token that is no padding.
        pad = tokenizer.pad_token_id
        model.config.pad_token_id = tokenizer.eos_token_id if pad is None else pad
        if model.config.pad_token_id is None:
            raise ConfigError(
                f"base {str(root)!r} cannot classify: its tokenizer names neither a padding token"
                " nor an end of text; add pad_token to its tokenizer_config.json"
            )
    context = getattr(model.config, "max_position_embeddings", None) or 0
    if model.config.model_type in {"roberta", "xlm-roberta", "camembert"}:
        context -= 2  # their positions begin behind the id of padding
    model.eval()
    if device is not None and not is_quantized:
        model = model.to(device)
    return Base(model, tokenizer, missing, max(0, int(context)))  # XLNet has -1: no limit


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a base. Raises ConfigError in one line."""
    transformers = extra("transformers")
    gguf = _gguf_file(path)
    root = checked_folder(path) if gguf is None else gguf.parent
    if gguf is None and not any((root / name).is_file() for name in TOKENIZERS):
        raise ConfigError(
            f"base {str(root)!r} has no tokenizer ({', '.join(TOKENIZERS[:3])}): copy it from where"
            " the weights are from"
        )
    more = {} if gguf is None else {"gguf_file": gguf.name}
    with quiet(), _one_line(root), collector_paused():
        return transformers.AutoTokenizer.from_pretrained(
            str(root), local_files_only=True, trust_remote_code=False, **more
        )


def save_base(base: Base, folder: str | Path) -> None:
    """Write model and tokenizer as a Hugging Face folder (safetensors)."""
    model: Any = base.model
    with quiet():
        model.save_pretrained(str(folder))
        base.tokenizer.save_pretrained(str(folder))


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers prints neither warnings nor progress bars from this thread."""
    transformers = extra("transformers")
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The bar of GGUF files heeds no setting.
        with warnings.catch_warnings(), redirect_stderr(_OtherThreads(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


class _OtherThreads(io.TextIOBase):
    """Passes on what other threads print."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._owner = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._owner:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _from_folder(
    transformers: Any,
    root: Path,
    objective: Objective,
    labels: Sequence[str],
    place: Mapping[str, Any],
) -> tuple[Any, tuple[str, ...]]:
    """The model, and the names of weights that its files lack."""
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(str(root), **local)
    # With labels set, a head of another size counts as missing, as the option wants.
    _set_labels(config, labels if objective in HEADS else ())
    if objective in HEADS:
        _leave_dense(transformers, config, base_facts(root).shapes)
    # What is missing is drawn anew below; here it must only leave the process's generator alone.
    with drawing(torch.device("cpu"), 0, "base"):
        model, info = _auto(transformers, objective).from_pretrained(
            str(root),
            config=config,
            **place,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=objective in HEADS,
            **local,
        )
    other_sizes = (each[0] for each in info["mismatched_keys"])
    return model, tuple(sorted({*info["missing_keys"], *other_sizes}))


def _leave_dense(transformers: Any, config: Any, stored: Collection[str]) -> None:
    """Have transformers make the heads that a quantized folder lacks as layers that are not packed.

    It would draw random numbers for packed weights, which raises. stored: names of weights in the
    folder.
    """
    packed = getattr(config, "quantization_config", None)
    if not isinstance(packed, dict):
        return
    with torch.device("meta"):
        made = transformers.AutoModelForSequenceClassification.from_config(config)
    lacking = {name.partition(".")[0] for name in heads_of(made) if name not in stored}
    packed["llm_int8_skip_modules"] = [*(packed.get("llm_int8_skip_modules") or ()), *lacking]


def _from_gguf(
    transformers: Any,
    path: Path,
    objective: Objective,
    labels: Sequence[str],
    place: Mapping[str, Any],
) -> tuple[Any, tuple[str, ...]]:
    """The same for a GGUF file.

    transformers marks what it loads from GGUF as quantized and then refuses to convert it, so the
    weights are given to a model made from the config.
    """
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True, **place
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    _set_labels(config, labels if objective in HEADS else ())
    with drawing(torch.device("cpu"), 0, "base"):
        model = _auto(transformers, objective).from_config(config, **place)
    (dtype,) = place.values()
    state = {name: value.to(dtype) for name, value in loaded.state_dict().items()}
    del loaded
    found = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model, tuple(sorted(found.missing_keys))


def _auto(transformers: Any, objective: Objective) -> Any:
    if objective in HEADS:
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM


def _set_labels(config: Any, labels: Sequence[str]) -> None:
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}


def _check_missing(root: Path, missing: Sequence[str], objective: Objective) -> None:
    """Only a classification head may be missing."""
    lost = [name for name in missing if objective not in HEADS or _TRUNK.search(name)]
    if lost:
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise ConfigError(
            f"base {str(root)!r} lacks the weights {lost[0]}{more}, which {objective} needs: choose"
            " a base that was trained for it"
        )


def _draw(weight: Tensor, name: str, seed: int, std: float) -> None:
    """Fill a weight in place from (seed, name): matrices uniform, biases 0, norms 1.

    Uniform numbers are multiples of 2^-23 in [-1, 1), scaled to the standard deviation in one
    rounding of fp32.
    """
    if weight.dim() < 2:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    bits = (random_words(seed, f"tune/head/{name}", weight.numel()) >> np.uint64(40)).astype("f4")
    drawn = (bits * np.float32(2**-23) - np.float32(1)) * np.float32(std * 3**0.5)
    weight.copy_(torch.from_numpy(drawn.reshape(tuple(weight.shape))))


def _gguf_file(path: str | Path) -> Path | None:
    """The GGUF file that the path is or, as a folder without config.json, holds alone."""
    found = Path(path).expanduser()
    if found.is_dir():
        inside = [] if (found / "config.json").is_file() else sorted(found.glob("*.gguf"))
        if len(inside) > 1:
            names = ", ".join(one.name for one in inside)
            raise ConfigError(f"base {str(found)!r} holds {names[:200]}: give one of them")
        found = inside[0] if inside else found
    if not found.is_file():
        return None
    try:
        with found.open("rb") as stream:
            is_gguf = stream.read(4) == _GGUF_MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read {str(found)!r} ({error.strerror or error})") from error
    return found if is_gguf else None


def _check_quantizer(root: Path, facts: BaseFacts) -> bool:
    """Whether bitsandbytes has quantized the base. Raises ConfigError for other quantizers."""
    table = facts.config.get("quantization_config")
    if not isinstance(table, dict):
        return False
    method = str(table.get("quant_method"))
    if method != "bitsandbytes":
        raise ConfigError(
            f"base {str(root)!r} is quantized by {method[:40]}, which is not supported: give the"
            " base that it was made from, or one that bitsandbytes has quantized"
        )
    extra("bitsandbytes", "quantized")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at each step
    return True


def _check_memory(root: Path, needed: int) -> None:
    """Raise ConfigError where the weights alone do not fit, before the system ends processes."""
    free = available_bytes()
    if free is not None and needed > free:
        raise ConfigError(
            f"base {str(root)!r} needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are"
            " free: use a smaller base or a larger machine"
        )


@contextmanager
def _one_line(root: Path) -> Iterator[None]:
    """Turn what a library raises for a damaged or unknown model into one line."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        text = one_line(str(error))[:300] or type(error).__name__
        raise ConfigError(f"base {str(root)!r} cannot be loaded: {text}") from error


class Tuned:
    """The base in a folder or GGUF file, with a run's adapters of the full rank.

    tune, seed: the run's; manifest: its exchanged tensors; head: the file of a site's head, where
    sites keep their own. Raises ConfigError in one line: the base cannot be loaded, or is another
    one than the run's.
    """

    def __init__(
        self, path: Path, tune: TuneConfig, seed: int, manifest: Manifest, head: Path | None = None
    ) -> None:
        if tune.has_own_head and head is None:
            raise UsageError(
                f"each site of this run keeps a head of its own: export there, with --head FILE, a"
                f" file *{SUFFIX} in the folder streams beside the site's keys"
            )
        self.tune = tune
        self.base: Base = load_base(path, tune.objective, labels=tune.label_names, seed=seed)
        self.model = self.base.model
        rule = adapter_rule_named(tune.rule)
        self.adapters = Adapters(self.model, tune, rule, seed=seed, heads=self.base.drawn)
        self._weights = ModelWeights(self.model, self.adapters.view)
        self._check(path, manifest)
        if head is not None:
            load_head(self.model, self.adapters.at_home, head)

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
