"""Facts of a base model from its folder alone: no torch, no transformers.

For the planner and the parameter server, which never build the model. Read are config.json and the
headers of the safetensors files.

`planned` computes the sizes of a run's adapters from the shapes of its base.
"""

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError, one_line
from fsl_async.files.safetensors_header import MOST_HEADER_BYTES, read_header
from fsl_async.learn.models import targets
from fsl_async.learn.models.targets import is_embedding, is_head

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# Where a model with a head has its trunk, by `model_type`; others: "model".
_TRUNKS = {
    "bert": "bert", "roberta": "roberta", "xlm-roberta": "roberta", "camembert": "roberta",
    "distilbert": "distilbert", "electra": "electra", "albert": "albert", "mpnet": "mpnet",
    "deberta": "deberta", "deberta-v2": "deberta", "gpt2": "transformer",
    "gpt_neo": "transformer", "bloom": "transformer", "falcon": "transformer",
    "gptj": "transformer", "mpt": "transformer", "gpt_neox": "gpt_neox", "mamba": "backbone",
    "mamba2": "backbone",
}  # fmt: skip
_TRANSPOSED = frozenset({"gpt2"})
"""Models that keep linear layers as (in, out), in Conv1D."""
_QUANT_STATE = ".quant_state.bitsandbytes__"
"""In the name of the JSON object beside a weight of 4 bits, which has the weight's shape."""
_SCALES = re.compile(r"\.weight\.|\.(SCB|weight_format)$")
"""In names of what bitsandbytes stores beside packed weights."""


@attrs.frozen(slots=True)
class Linear:
    """A linear layer: name as in the loaded model, sizes of its input and output."""

    name: str
    inputs: int
    outputs: int


@attrs.frozen(slots=True)
class BaseFacts:
    """A base model's config, and its tensors by name as in the loaded model, in natural order.

    A tied output layer is not in the files, nor is a new classification head. packed: names of the
    weights that bitsandbytes has packed; their shapes are (out, in) all the same.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    packed: frozenset[str] = frozenset()

    @property
    def parameters(self) -> int:
        """Weights in all."""
        return sum(map(prod, self.shapes.values()))

    @property
    def trunk(self) -> str:
        """Name of the module that all models of the family share."""
        return _TRUNKS.get(str(self.config.get("model_type")), "model")

    def bytes_at(self, width: int) -> int:
        """Bytes in memory with `width` bytes a value; a packed value takes 1 at most."""
        packed = sum(prod(self.shapes[name]) for name in self.packed)
        return packed + width * (self.parameters - packed)

    @property
    def linear(self) -> tuple[Linear, ...]:
        """All linear layers, heads too."""
        is_transposed = self.config.get("model_type") in _TRANSPOSED
        found = []
        for name, shape in self.shapes.items():
            module, _, kind = name.rpartition(".")
            if kind != "weight" or len(shape) != 2 or is_embedding(module):
                continue
            outputs, inputs = shape
            if is_transposed and not is_head(name, self.trunk):
                outputs, inputs = inputs, outputs
            found.append(Linear(module, inputs, outputs))
        return tuple(found)


def base_facts(folder: str | Path) -> BaseFacts:
    """Read the facts of the base model in a Hugging Face folder.

    Raises ConfigError: no such folder, no config.json, no safetensors, damage.
    """
    root = checked_folder(folder)
    config = read_json(root / CONFIG)
    shapes: dict[str, tuple[int, ...]] = {}
    packed: set[str] = set()
    for path in weight_files(root):
        found, is_packed = _header(path)
        shapes |= found
        packed |= is_packed
    trunk = BaseFacts(config, shapes).trunk
    if not any(name.startswith(f"{trunk}.") for name in shapes):
        # The file holds a trunk without its head; the loaded model has both.
        whole = {name: name if is_head(name, "") else f"{trunk}.{name}" for name in shapes}
        shapes = {whole[name]: shape for name, shape in shapes.items()}
        packed = {whole[name] for name in packed}
    ordered = dict(sorted(shapes.items(), key=lambda each: _natural(each[0])))
    return BaseFacts(config, ordered, frozenset(packed))


def checked_folder(folder: str | Path) -> Path:
    """Return the folder's path. Raises ConfigError where it holds no model."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"base {str(root)!r} is no folder: give --base the folder of a Hugging Face model"
            " (config.json, model.safetensors, tokenizer.json); nothing is downloaded"
        )
    if not (root / CONFIG).is_file():
        raise ConfigError(f"base {str(root)!r} has no {CONFIG}: it is no Hugging Face model")
    return root


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ConfigError where there are none, or one lacks."""
    if (root / WEIGHTS).is_file():
        return [root / WEIGHTS]
    if not (root / INDEX).is_file():
        pickled = next((path for kind in PICKLED for path in sorted(root.glob(kind))), None)
        if pickled is not None:
            raise ConfigError(
                f"base {str(root)!r} has its weights in {pickled.name}, a pickle, which can run"
                " code and is never read: convert it with save_pretrained, which writes safetensors"
            )
        raise ConfigError(f"base {str(root)!r} has no {WEIGHTS}")
    table = read_json(root / INDEX).get("weight_map")
    names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError(f"{str(root / INDEX)!r} is damaged: copy the base again")
    for name in names:
        if not (root / name).is_file():
            raise ConfigError(f"base {str(root)!r} lacks {name}: copy the base again")
    return [root / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises ConfigError."""
    try:
        with path.open("rb") as stream:
            return _object(stream.read(MOST_HEADER_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error.strerror or error})") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error


def _header(path: Path) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of the weights in a safetensors file, and the names of packed ones."""
    try:
        with path.open("rb") as stream:
            entries, data_at = read_header(stream.read)
            held = stream.seek(0, 2) - data_at
            needed = max((int(each["data_offsets"][1]) for each in entries.values()), default=0)
            shapes, packed = {}, set()
            for name, each in entries.items():
                weight, state, _ = name.partition(_QUANT_STATE)
                if state:
                    start, stop = map(int, each["data_offsets"])
                    stream.seek(data_at + start)
                    shape = _object(stream.read(min(stop - start, MOST_HEADER_BYTES)))["shape"]
                elif _SCALES.search(name) or not str(each["dtype"]).startswith(("F", "BF", "I8")):
                    continue
                else:
                    shape = each["shape"]
                shapes[weight] = tuple(map(int, shape))
                if state or each["dtype"] == "I8":
                    packed.add(weight)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise _damaged(path, error) from error
    if held < needed:
        raise ConfigError(f"{str(path)!r} is short or damaged: copy the base again")
    return shapes, packed


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise TypeError("it is no JSON object")
    return found


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is damaged ({one_line(str(error))[:200]}): copy the base again"
    )


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts block 10 behind block 9."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


_TWO = ("classifier.dense", "classifier.out_proj")
_CLASSIFIERS: Mapping[str, Sequence[str]] = {
    "bert": ("bert.pooler.dense", "classifier"), "albert": ("albert.pooler", "classifier"),
    "roberta": _TWO, "xlm-roberta": _TWO, "camembert": _TWO, "electra": _TWO, "mpnet": _TWO,
    "distilbert": ("pre_classifier", "classifier"), "deberta": ("pooler.dense", "classifier"),
    "deberta-v2": ("pooler.dense", "classifier"),
    "bart": ("classification_head.dense", "classification_head.out_proj"),
}  # fmt: skip
"""The layers of a classifier, by `model_type`: as wide as the model, but for the last one, which
has an output for each label. Decoders have one without a bias, called score."""


@attrs.frozen
class Planned:
    """The tensors that a client exchanges, counted from the files of its base."""

    layers: tuple[Linear, ...]
    """Layers that get adapters."""
    full: int
    """Values of weights that train whole."""
    left_out: str
    """A line about matrices that get no adapter, or ""."""


def planned(facts: BaseFacts, tune: TuneConfig) -> Planned:
    """Choose the layers that get adapters, and count the weights that train whole.

    Raises ConfigError for targets and names of full weights that the base does not have.
    """
    head = _head_shapes(facts, tune)
    model = attrs.evolve(facts, shapes=_loaded_shapes(facts, tune) | head)
    whole = [*head, *_full_names(model, tune, head)]
    wanted = [name for name in tune.targets.split(",") if name]
    linear = {layer.name: layer for layer in model.linear}
    names = targets.adapted_layers(
        linear, facts.shapes, trunk=facts.trunk, targets=wanted, whole=whole
    )
    left_out = targets.without_adapters(
        model.shapes, trunk=facts.trunk, adapted=names, targets=wanted, whole=whole
    )
    full = sum(prod(model.shapes[name]) for name in whole)
    return Planned(tuple(linear[name] for name in names), full, left_out)


def _head_shapes(facts: BaseFacts, tune: TuneConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a classifier that train whole: outside the trunk, or not on file."""
    if tune.objective != "classify":
        return {}
    config = facts.config
    named = (config[name] for name in ("hidden_size", "n_embd", "dim", "d_model") if name in config)
    width = int(next(named, 0))
    kind = str(config.get("model_type"))
    layers = _CLASSIFIERS.get(kind, ("score",))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        outputs = len(tune.label_names) if layer == layers[-1] else width
        if is_head(layer, facts.trunk) or f"{layer}.weight" not in facts.shapes:
            shapes[f"{layer}.weight"] = (outputs, width)
            if kind in _CLASSIFIERS:
                shapes[f"{layer}.bias"] = (outputs,)
    return shapes


def _loaded_shapes(facts: BaseFacts, tune: TuneConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of what the client's model takes from the files."""
    if tune.objective != "classify":
        return dict(facts.shapes)
    has_pooler = facts.config.get("model_type") in {"bert", "albert"}
    return {
        name: shape
        for name, shape in facts.shapes.items()
        if not is_head(name, facts.trunk)
        if has_pooler or not name.startswith(f"{facts.trunk}.pooler.")
    }


def _full_names(model: BaseFacts, tune: TuneConfig, head: Mapping[str, object]) -> list[str]:
    """Names of the weights that tune.full names, without the head's."""
    found: dict[str, None] = {}
    for pattern in filter(None, tune.full.split(",")):
        matched = fnmatch.filter(model.shapes, pattern)
        if not matched:
            raise ConfigError(f"tune.full: no weight of the base matches {pattern}", "tune.full")
        found |= dict.fromkeys(name for name in matched if name not in head)
    return list(found)
