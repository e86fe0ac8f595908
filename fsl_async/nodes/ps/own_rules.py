"""Loads rules that the operator of a parameter server has written, each as file.py:Class.

A rule is loaded from the bytes whose digest is recorded, and tried before the server listens
(`fsl_async.nodes.ps.own_checks`). Each of its calls is checked, too: an exception or a wrong result
is a `RuleFailed`, after which the deltas stay pending. See docs/OWN_RULES.md and docs/adr/0164.
"""

from __future__ import annotations

import functools
import hashlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from fsl_async.config.rules import is_own
from fsl_async.errors import ConfigError, TaskError, one_line
from fsl_async.files.files import replace_bytes
from fsl_async.learn.user_code import load_module
from fsl_async.nodes.ps.own_checks import KINDS, Kind
from fsl_async.store.errors import RuleFailed, StoreError
from fsl_async.store.rules.adapters import RULES, AdapterRule

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from fsl_async.config.settings import Config

FOLDER = "rules"
"""In the run directory: the text of each rule that the run has used, by its digest."""


@frozen
class Source:
    """The text of a rule: its file, the name of its class, and the bytes of the file."""

    path: Path
    name: str
    text: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    def failed(self, method: Any, problem: str | BaseException) -> RuleFailed:
        """Return the error of a call, with file and line."""
        code = getattr(method, "__code__", None)
        line = 1 if code is None else code.co_firstlineno
        name = getattr(method, "__qualname__", type(method).__name__)
        if isinstance(problem, BaseException):
            for frame, number in traceback.walk_tb(problem.__traceback__):
                if frame.f_code.co_filename == str(self.path):
                    line, name = number, frame.f_code.co_qualname
            problem = f"{type(problem).__name__}: {one_line(str(problem)) or 'no message'}"
        return RuleFailed(f"{self.path.name}:{line}: in {name}: {problem}")

    def checked(self, method: Callable[..., Any], check: Callable[..., str]) -> Callable[..., Any]:
        """Return a method whose results are checked. It raises RuleFailed, and StoreError as is."""

        @functools.wraps(method)
        def call(rule: Any, *given: Any) -> Any:
            try:
                with np.errstate(all="ignore"):  # the check finds what is not finite
                    result = method(rule, *given)
            except StoreError:
                raise
            except (Exception, SystemExit) as error:
                raise self.failed(method, error) from error
            if problem := check(rule, result, *given):
                raise self.failed(method, problem)
            return result

        return call


def own_rule(key: str, text: str, *settings: float) -> type[Any]:
    """Return the class that setting `key` names as file.py:Class; the same while its file is.

    settings: with which the run makes it. Its name is `Class@` and the first 8 digits of the file's
    digest, as versions record it. Raises ConfigError, in one line.
    """
    place, _, name = text.rpartition(":")
    path = Path(place).expanduser().resolve()
    if not place:
        raise ConfigError(f"{key} = {text}: name your class as file.py:Class", key)
    if not path.is_file():
        raise ConfigError(f"{key} = {text}: no such file {path}", key)
    return _loaded(key, Source(path, name, path.read_bytes()), *settings)


@functools.lru_cache(64)
def _module(path: Path, text: bytes) -> ModuleType:
    return load_module(path.name, path, text)


@functools.lru_cache(64)
def _loaded(key: str, source: Source, *settings: float) -> type[Any]:
    try:
        return _made(KINDS[key], source, *settings)
    except (TaskError, RuleFailed) as error:
        shown = "tune.rule" if key == "tune.merge" else key  # which is what the operator has set
        raise ConfigError(f"{shown}: {error}", key) from error


def _made(kind: Kind, source: Source, *settings: float) -> type[Any]:
    """Load, check and try a class. Raises TaskError, RuleFailed."""
    label = f"{source.path.name}:{source.name}"
    found = getattr(_module(source.path, source.text), source.name, None)
    if not (isinstance(found, type) and issubclass(found, kind.base)):
        base = f"fsl_async.store.rules.{kind.base.__name__}"
        if kind.base is AdapterRule:
            base = "a built-in rule that merges products, as FlexLoRA"
        problem = f"does not derive from {base}" if found else "there is no such class"
        raise RuleFailed(f"{label}: {problem}")
    calls = {
        name: source.checked(getattr(found, name), check) for name, check in kind.calls.items()
    }
    facts = {"name": f"{source.name}@{source.digest[:8]}", "source": source}
    made = type(source.name, (found,), facts | calls)
    try:
        problem = kind.trial(made, *settings)
    except RuleFailed:
        raise
    except (Exception, SystemExit) as error:
        raise source.failed(found, error) from error
    if problem:
        raise RuleFailed(f"{label}: {problem}")
    return made


def with_base_rule(config: Config) -> Config:
    """Load the run's own rules, and set `tune.rule` to the built-in one that `tune.merge` is.

    Clients train as that rule asks, so they need nothing of the class. Raises ConfigError.
    """
    sources_of(config)
    if not config.tune.merge:
        return config
    found = own_rule("tune.merge", config.tune.merge)
    base: Any = next(rule.name for rule in RULES.values() if issubclass(found, rule))
    return evolve(config, tune=evolve(config.tune, rule=base))


def sources_of(config: Config) -> dict[str, Source]:
    """Return the texts of the run's own rules by setting. Raises ConfigError."""
    tables = {key: key.split(".") for key in KINDS}
    given = {key: getattr(getattr(config, table), name) for key, (table, name) in tables.items()}
    outer, owns = config.outer, {key: text for key, text in given.items() if is_own(text)}
    made_with = {
        "outer.aggregation": (outer.byzantine,),
        "outer.optimizer": (outer.learning_rate, outer.momentum),
    }
    return {key: own_rule(key, text, *made_with.get(key, ())).source for key, text in owns.items()}


def rule_facts(config: Config) -> dict[str, dict[str, str]]:
    """Return what the journal records of the run's own rules, by setting."""
    return {
        key: {"file": str(one.path), "class": one.name, "sha256": one.digest}
        for key, one in sources_of(config).items()
    }


def keep_texts(run_dir: Path, config: Config) -> None:
    """Copy the texts of the run's own rules into its directory. Raises OSError."""
    for source in sources_of(config).values():
        (run_dir / FOLDER).mkdir(exist_ok=True)
        name = f"{source.path.stem}-{source.digest[:8]}.py"
        replace_bytes(run_dir / FOLDER / name, source.text)
