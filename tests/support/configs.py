"""Configurations of machines under test, from a few settings."""

import attrs

from fsl_async.config.settings import TABLES, Config, GuardConfig
from fsl_async.roles.sync.deltas import Counting, Deltas
from fsl_async.roles.sync.norm_guard import NormGuard


def roster_of(names):
    """Make a roster of parameter servers."""
    return ", ".join(f"{name}=fsl://127.0.0.1:7100" for name in names)


ROSTER = roster_of("abc")


def guard_of(**limits):
    """Make limits of which only the given ones are on."""
    return GuardConfig(**{"clip_median": 0, "max_tokens_median": 0, "max_share": 0, **limits})


def book_of(weighting, **options):
    """Make a book of deltas that counts each client once, without limits."""
    return Deltas(weighting, counting=Counting(weighting, NormGuard(guard_of())), **options)


def config_of(first, **given):
    """Make a configuration of tables and settings.

    A setting is one of the table `first`, or else of the first table that has one of its name.
    """
    tables = {}
    for name, value in given.items():
        if name not in TABLES:
            has = [table for table, kind in TABLES.items() if name in attrs.fields_dict(kind)]
            table = first if first in has else has[0]
            tables.setdefault(table, {})[name] = value
    made = {table: TABLES[table](**values) for table, values in tables.items()}
    return Config(**made, **{name: value for name, value in given.items() if name in TABLES})
