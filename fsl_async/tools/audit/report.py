"""The lines, the JSON object and the page of an audit, in the order in which people ask. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from attrs import asdict, frozen

from fsl_async.config.site_policy import AuditLimits
from fsl_async.tools.audit.audit import Findings, Reading
from fsl_async.tools.audit.membership import Membership

CAUTION = "what is not read here is not read by this attack; others may read it"


@frozen
class Section:
    """A part of a report. rows: of a table, the first is its head; empty: lines only."""

    title: str
    lines: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()


def sections(found: Findings) -> list[Section]:
    """All parts of a report."""
    return list(_sections(found))


def _sections(found: Findings) -> Iterator[Section]:
    worst = found.worst
    if worst is None:
        yield Section("The worst record", ("nothing was read",))
    else:
        title = f"The worst record: {_percent(worst.share)} of it was read"
        yield Section(title, (f"record: {worst.text}", f"read:   {worst.read}"))
    own = found.readings[0]
    yield Section(
        "Words of your records that the server reads",
        (
            f"{_percent(own.read)} of {own.words:,} different words in a round",
            f"{_precision(own)} of what it reads is in them",
            _how(found, own),
            CAUTION,
        ),
    )
    head = ("if", "words", "read", "right", "in order")
    rows = tuple(map(_row, found.readings))
    yield Section("The same if", (), (head, *rows))
    yield Section(
        "Whether a record was in your data",
        tuple(_member_line(label, member) for label, member in _members(found)),
    )
    if found.exposures:
        lines = tuple(
            f"planted {copies} times: {bits:.1f} of at most {found.most_exposure:.1f} bits"
            for copies, bits in found.exposures
        )
        yield Section("How well a planted code can be guessed", lines)
    yield Section("A bound", (_bound(found),))


def _members(found: Findings) -> Iterator[tuple[str, Membership]]:
    counts = f"{found.members} records of a round against {found.others} others"
    yield f"from the delta of a round ({counts})", found.member
    if found.merged is not None:
        yield f"from the model after {found.rounds} rounds of this site alone", found.merged


def _member_line(label: str, member: Membership) -> str:
    return (
        f"{label}: right in {_percent(member.auc)} of pairs (chance is 50 %);"
        f" {_percent(member.found)} of them are found at 1 % false"
    )


def _how(found: Findings, own: Reading) -> str:
    if own.by_rows:
        return "by the rows of the embedding, which trains: exact, whatever the number of steps"
    if not found.is_exact:
        return "the first layers that train are behind others: their inputs are guessed"
    if own.in_order is None:
        return "positions cannot be told"
    return f"{_percent(own.in_order)} of the first {found.positions} tokens in order"


def _bound(found: Findings) -> str:
    if found.epsilon is None:
        return "none: the numbers above are of these attacks only"
    epsilon, noise, rate = found.epsilon
    return (
        f"epsilon {epsilon:g} for all rounds, for each record: noise {noise:.3g}, sample rate"
        f" {rate:.3g}"
    )


def _row(one: Reading) -> tuple[str, ...]:
    if one.problem:
        return one.label, one.problem, "", "", ""
    order = "-" if one.in_order is None else _percent(one.in_order)
    return one.label, f"{one.words:,}", _percent(one.read), _precision(one), order


def _precision(one: Reading) -> str:
    return "-" if one.precision is None else _percent(one.precision)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def text(found: Findings) -> list[str]:
    """The report as lines."""
    lines: list[str] = []
    for number, one in enumerate(sections(found), 1):
        lines += ["", f"{number}. {one.title}", *(f"   {line}" for line in one.lines)]
        widths = [max(map(len, column)) for column in zip(*one.rows, strict=True)]
        lines += ["   " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in one.rows]
    return lines[1:]


def as_json(found: Findings, beyond: list[str]) -> dict[str, Any]:
    """The report as one object. beyond: limits of the site that are exceeded."""
    return {"event": "audit", **asdict(found), "beyond": beyond}


def page(found: Findings, title: str) -> str:
    """The report as a page that needs nothing else."""
    parts = []
    for one in sections(found):
        head, *rest = one.rows or ((),)
        cells = "".join(f"<th>{html.escape(cell)}" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rest)
        table = f"<table><tr>{cells}{body}</table>" if one.rows else ""
        lines = "".join(f"<p><code>{html.escape(line)}</code>" for line in one.lines)
        parts.append(f"<h2>{html.escape(one.title)}</h2>{lines}{table}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Audit</title><style>'
        "body{font:16px system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:left;padding:.2em 1em .2em 0;border-bottom:1px solid #ccc}</style>"
        f"<h1>{html.escape(title)}</h1><ol>"
        + "".join(f"<li>{part}</li>" for part in parts)
        + "</ol></html>\n"
    )


def beyond(found: Findings, limits: AuditLimits) -> list[str]:
    """Say which limits of the site are exceeded, one line each."""
    said, read = [], 100 * found.readings[0].read
    if limits.words_percent is not None and read > limits.words_percent:
        said.append(f"the server reads {read:.0f} % of the words; this site allows"
                    f" {limits.words_percent:g} %")  # fmt: skip
    members = [member.auc for _, member in _members(found)]
    if limits.auc is not None and max(members) > limits.auc:
        said.append(f"members are told from others with an AUC of {max(members):.2f}; this site"
                    f" allows {limits.auc:g}")  # fmt: skip
    return said
