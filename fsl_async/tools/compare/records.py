"""The records of all sites, tokenized, and those that versions are scored on. Imports torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
from attrs import frozen

from fsl_async.errors import UsageError
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.task import tokenized
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.tools.compare.tune import TuningChoices

_SOURCES = itertools.count(-1, -1)
"""Numbers of joined data; those of a file are not negative."""


@frozen(eq=False)
class SiteRecords:
    """trained: what each site trains on. held: what all versions are scored on."""

    trained: tuple[Tokenized, ...]
    held: Tokenized

    @property
    def all_trained(self) -> Tokenized:
        """What all sites together train on."""
        return joined(self.trained)


def load_records(choices: TuningChoices) -> SiteRecords:
    """Read and tokenize everything once, as the sites will.

    Raises, in one line, ConfigError and DataError, before anything is started.
    """
    config = choices.run(choices.methods[0]).config
    tune = config.tune
    paths = [*choices.data, *filter(None, [choices.held_out])]
    # Records of a wrong kind are an error before the model is loaded.
    opened = [
        Records(path, tune.objective, tune.label_names, columns=choices.columns) for path in paths
    ]
    base = load_base(choices.base, tune.objective, labels=tune.label_names)
    found = [tokenized(one, base, tune) for one in opened]
    sites = [one.split(config.data.holdout) for one in found[: len(choices.data)]]
    held = found[len(sites) :] or [part for _, part in sites if part is not None]
    if not held:
        raise UsageError("no record is held out: give --eval FILE, or --set data.holdout=0.1")
    return SiteRecords(tuple(mine for mine, _ in sites), joined(held))


def joined(parts: Sequence[Tokenized]) -> Tokenized:
    """All samples of the parts, which are of one objective and one tokenizer."""
    first = parts[0]
    ends = [0, *itertools.accumulate(len(one.ids) for one in parts)]
    samples = [0, *itertools.accumulate((len(one.starts) - 1) // one.width for one in parts)]
    starts = [one.starts[:-1] + end for one, end in zip(parts, ends, strict=False)]
    labels = [one.labels for one in parts if one.labels is not None]
    return attrs.evolve(
        first,
        ids=np.concatenate([one.ids for one in parts]),
        trained=np.concatenate([one.trained for one in parts]),
        starts=np.concatenate([*starts, np.array(ends[-1:], np.int64)]),
        labels=np.concatenate(labels) if labels else None,
        rows=np.concatenate([one.rows + at for one, at in zip(parts, samples, strict=False)]),
        source=next(_SOURCES),
    )
