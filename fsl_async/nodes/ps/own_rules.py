"""Loads rules that the operator of a parameter server has written, each as file.py:Class.

    outer.aggregation   derives from `fsl_async.store.aggregation.Rule`
    tune.merge          derives from a rule of adapters that merges products

A rule is loaded from the bytes whose digest is recorded, tried on random values before the
parameter server listens (`fsl_async.nodes.ps.own_checks`), and each of its calls is checked: an
exception or a wrong result is a `RuleFailed`, after which the deltas stay pending.
"""

from __future__ import annotations

import functools
import hashlib
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from fsl_async.config.rules import is_own
from fsl_async.errors import ConfigError, TaskError, one_line
from fsl_async.files.private_files import replace_bytes
from fsl_async.learn.user_code import load_module
from fsl_async.nodes.ps import own_checks
from fsl_async.store.adapters import RULES, AdapterRule
from fsl_async.store.aggregation import Rule
from fsl_async.store.errors import RuleFailed, StoreError

if TYPE_CHECKING:
    from fsl_async.config.settings import Config

FOLDER = "rules"
"""In the run directory: the text of each rule that the run has used, by its digest."""

KINDS: dict[str, own_checks.Kind] = {
    "outer.aggregation": own_checks.Kind(
        Rule,
        {"combine": own_checks.combined, "choose": own_checks.chosen},
        own_checks.try_rule,
        {"reads_metrics": True},
    ),
    "tune.merge": own_checks.Kind(
        AdapterRule, {"merge": own_checks.merged}, own_checks.try_adapter_rule
    ),
}
"""By setting: the class that a rule derives from, the checks of its calls, and its trial."""


@frozen
class Source:
    """The text of a rule: its file, class, and the bytes of the file."""

    path: Path
    name: str
    text: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    def failed(self, where: object, problem: str | Exception) -> RuleFailed:
        """Return the error of a call, with the file and line. where: the method."""
        code: Any = getattr(where, "__code__", None)
        line = code.co_firstlineno if code is not None else 1
        name = getattr(where, "__qualname__", self.name)
        text = problem
        if isinstance(problem, Exception):
            for frame, number in traceback.walk_tb(problem.__traceback__):
                if frame.f_code.co_filename == str(self.path):
                    line, name = number, frame.f_code.co_qualname
            text = f"{type(problem).__name__}: {one_line(str(problem)) or 'no message'}"
        return RuleFailed(f"{self.path.name}:{line}: in {name}: {text}")


def own_rule(key: str, text: str) -> type[Any]:
    """Return the class that setting `key` names as file.py:Class; the same while the file is.

    Its instances are called `Class@` and the first 8 digits of the file's digest, as versions
    record it. Raises ConfigError, in one line.
    """
    place, _, name = text.rpartition(":")
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key} = {text}: no such file {path}", key)
    return _loaded(key, Source(path, name, path.read_bytes()))


@functools.lru_cache(64)
def _module(source: Source) -> ModuleType:
    return load_module(source.path.name, source.path, source.text)


@functools.lru_cache(64)
def _loaded(key: str, source: Source) -> type[Any]:
    kind = KINDS[key]
    label = f"{key} = {source.path.name}:{source.name}"
    try:
        found = getattr(_module(evolve(source, name="")), source.name, None)
    except TaskError as error:
        raise ConfigError(f"{key}: {error.message}", key) from error
    if not (isinstance(found, type) and issubclass(found, kind.base)):
        base = f"{kind.base.__module__.rpartition('.')[0]}.{kind.base.__name__}"
        what = "there is no such class" if found is None else f"it does not derive from {base}"
        raise ConfigError(f"{label}: {what}", key)
    methods = {
        name: _checked(source, getattr(found, name), check) for name, check in kind.calls.items()
    }
    facts = {"name": f"{source.name}@{source.digest[:8]}", "source": source}
    made = type(source.name, (found,), {**facts, **kind.facts, **methods})
    try:
        problem = kind.trial(made)
    except RuleFailed as error:
        raise ConfigError(f"{key}: {error}", key) from error
    except Exception as error:
        raise ConfigError(f"{key}: {source.failed(found, error)}", key) from error
    if problem:
        raise ConfigError(f"{label}: {problem}", key)
    return made


def _checked(
    source: Source, method: Callable[..., Any], check: Callable[..., str]
) -> Callable[..., Any]:
    """Return `method` with its result checked. It raises RuleFailed, and StoreError unchanged."""

    @functools.wraps(method)
    def call(self: Any, *given: Any) -> Any:
        try:
            with np.errstate(all="ignore"):  # the check finds what is not finite
                result = method(self, *given)
        except StoreError:
            raise
        except Exception as error:
            raise source.failed(method, error) from error
        if problem := check(self, result, *given):
            raise source.failed(method, problem)
        return result

    return call


def with_base_rule(config: Config) -> Config:
    """Set `tune.rule` to the built-in rule that the class of `tune.merge` derives from.

    Clients train as that rule asks, so they need nothing of the class. Raises ConfigError.
    """
    if not config.tune.merge:
        return config
    found = own_rule("tune.merge", config.tune.merge)
    base: Any = next(rule.name for rule in RULES.values() if issubclass(found, rule))
    return evolve(config, tune=evolve(config.tune, rule=base))


def sources_of(config: Config) -> dict[str, Source]:
    """Return the texts of the run's own rules by setting. Raises ConfigError."""
    given = {
        "outer.aggregation": config.outer.aggregation,
        "outer.optimizer": config.outer.optimizer,
        "tune.merge": config.tune.merge,
    }
    return {key: own_rule(key, text).source for key, text in given.items() if is_own(text)}


def rule_facts(config: Config) -> dict[str, dict[str, str]]:
    """Return what the journal records of the run's own rules, by setting."""
    return {
        key: {"file": str(one.path), "class": one.name, "sha256": one.digest}
        for key, one in sources_of(config).items()
    }


def keep_texts(run_dir: Path, config: Config) -> None:
    """Copy the texts of the run's own rules into its directory. Raises OSError."""
    for source in sources_of(config).values():
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        replace_bytes(folder / f"{source.path.stem}-{source.digest[:8]}.py", source.text)
