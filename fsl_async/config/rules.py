"""A setting: a field with its help line and its check; and the checks.

A check takes a value of the right type and returns None when it is fine, else what it must be. The
settings are in `fsl_async.config.settings` and `fsl_async.config.settings_training`. Pure.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs

from fsl_async.errors import printable
from fsl_async.roles.names import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_TEXT = 1024
LANGUAGE_FAMILIES = ("gpt", "gpt2", "llama", "qwen2", "qwen3", "opt")
"""Of causal language models; all but the first are Hugging Face's."""
FAMILIES = (*LANGUAGE_FAMILIES, "resnet18", "small-cnn")
Format = Literal["fp32", "bf16", "e4m3", "e5m2", "uniform"]
"""The number formats of fsl_codecs, by which values travel."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")


class SettingError(ValueError):
    """A setting is out of range. `key` is its dotted name and `problem` says what is wrong with the
    value.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


def show(value: object) -> str:
    """Write a value as it stands in TOML, shortened, for error messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + printable(value if len(value) <= 80 else value[:80] + "...") + '"'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    return str(value)


def span(
    *, above: float | None = None, least: float | None = None, most: float | None = None
) -> Callable[[Any], str | None]:
    """Make a check that a number is above or at least one bound, and at most another."""
    words = []
    if above is not None:
        words.append(f"above {above:,}")
    if least is not None:
        words.append(f"at least {least:,}")
    if most is not None:
        words.append(f"at most {most:,}")
    text = "must be " + " and ".join(words)

    def check(value: Any) -> str | None:
        fits = (
            (above is None or value > above)
            and (least is None or value >= least)
            and (most is None or value <= most)
        )
        return None if fits else text

    return check


def must_be_name(value: Any) -> str | None:
    """Of a run, a client or a file."""
    if NAME.fullmatch(value) and value not in {".", ".."}:
        return None
    return "must be 1 to 64 letters, digits, dots, dashes or underscores"


def must_be_device(value: Any) -> str | None:
    """Of torch."""
    return None if _DEVICE.fullmatch(value) else "must be auto, cpu, cuda, cuda:N or mps"


def must_be_directory(value: Any) -> str | None:
    """A path with no placeholder but {name}."""
    if value and not re.search(r"[{}]", value.replace("{name}", "")):
        return None
    return "must be a path, in which {name} stands for run.name"


OWN = "own"
"""Stands for code that every node brings itself. On the wire it replaces file.py:function, which
names a file of the sender's.
"""


def must_be_task(value: Any) -> str | None:
    """Own code, or nothing."""
    if not value or is_own(value):
        return None
    return (
        "must be file.py:function, own (each client brings its --task), or empty for the "
        "built-in task"
    )


def is_own(value: str) -> bool:
    """Whether a setting stands for code of the user's: as file.py:function, or as `OWN`."""
    return value == OWN or re.fullmatch(r".+\.py:[A-Za-z_][A-Za-z0-9_]*", value) is not None


def must_be_family(value: Any) -> str | None:
    """Of models, or own code."""
    if value in FAMILIES or is_own(value):
        return None
    return f"must be one of {', '.join(FAMILIES)}, or file.py:function"


ACTIVATION_FUNCTIONS = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)
"""Of transformers, those that need nothing but torch."""


def must_be_sizes(value: Any) -> str | None:
    """Names with values, as a model's configuration has them.

    Numbers, true, false and none, and one of `ACTIVATION_FUNCTIONS`. Other texts of such a
    configuration choose code (an attention kernel, a quantizer, an activation of another package),
    which is not for the server of a run to choose.
    """
    number = r"([0-9.+-][0-9.eE+-]*|true|false|none)"
    functions = "|".join(ACTIVATION_FUNCTIONS)
    size = rf"[A-Za-z][A-Za-z0-9_]*\s*=\s*{number}"
    function = rf"(hidden_act|activation_function)\s*=\s*({functions})"
    one = rf"\s*({size}|{function})\s*"
    if not value or re.fullmatch(rf"{one}(,{one})*", value, re.IGNORECASE):
        return None
    return (
        "must be numbers by name, like hidden_size=64, num_hidden_layers=4 (hidden_act and "
        "activation_function take a name such as silu)"
    )


def must_be_shape(value: Any) -> str | None:
    """Of a sample, or nothing."""
    if not value or re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,7}", value):
        return None
    return "must be like 3x32x32"


def must_be_fingerprint(value: Any) -> str | None:
    """Of data, or nothing."""
    return None if re.fullmatch(r"([0-9a-f]{32})?", value) else "must be 32 hexadecimal digits"


def must_be_counts(value: Any) -> str | None:
    """Of labels, or nothing."""
    if not value or re.fullmatch(r"[0-9]{1,15}(,[0-9]{1,15})*", value):
        return None
    return "must be like 500,500,480"


def must_be_power_of_two(value: Any) -> str | None:
    """Of values that share a scale."""
    fits = 16 <= value <= 1024 and value & (value - 1) == 0
    return None if fits else "must be a power of two from 16 to 1,024"


def _validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    problem: str | None = None
    if isinstance(value, float) and not math.isfinite(value):
        problem = "must be a finite number"
    elif isinstance(value, int) and abs(value) >= 1 << 63:  # a message has no room for more
        problem = "must be a whole number of at most 63 bits"
    elif isinstance(value, str) and (len(value) > MAX_TEXT or not (value.isprintable())):
        problem = f"must be printable text of at most {MAX_TEXT:,} characters"
    else:
        check = attribute.metadata["check"]
        problem = check(value) if check is not None else None
    if problem is not None:
        key = f"{table_name(type(instance))}.{attribute.name}"
        raise SettingError(key, f"{problem}, got {show(value)}")


def setting(
    default: T,
    help_line: str,
    check: Callable[[Any], str | None] | None = None,
    *,
    fixed: bool = False,
) -> T:
    """Declare one setting: its default, its line of help and its check (None when fine, else what
    it must be).

    fixed: a run that has a version keeps the value it began with; see `fsl_async.config.fixed`.
    """
    metadata = {"help": help_line, "check": check, "fixed": fixed}
    return attrs.field(default=default, validator=_validate, metadata=metadata)


def table_name(table: type) -> str:
    """Name of the TOML table that a settings class stands for: that of the class, SyncConfig of
    `sync`.
    """
    return table.__name__.removesuffix("Config").lower()
