"""Makes the deltas of an audit, attacks them, and gathers what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from fsl_async.config.settings import FINE_STEP, Config
from fsl_async.config.settings_tuning import PRIVATE_RULES, AdapterRuleName
from fsl_async.errors import ConfigError
from fsl_async.roles.phrasing import counted
from fsl_async.tools.audit.inputs import FirstLayers, atoms, first_layers
from fsl_async.tools.audit.membership import Membership, exposure, membership
from fsl_async.tools.audit.pursuit import pursue
from fsl_async.tools.audit.site_round import SentDelta, Shape, SiteRounds

MOST_TOKENS = 512
"""Tokens that a pursuit looks for in one delta."""
MOST_ROUNDS = 10
"""Rounds after which the model of the site alone is looked at."""
USUAL_ROUNDS = 20
"""An epsilon is of so many rounds where the run does not state how many it has."""


@frozen(kw_only=True)
class Reading:
    """The words that an attack read in one delta. Shares are of 0 to 1.

    label: how the round trained. words: different tokens of its records, without special ones.
    read: the share of them that was read. precision: the share of what was read that is in the
    records; None: nothing was read. in_order: the share of tokens, at the positions that were
    tried, that were read at their position; None: positions cannot be told.
    by_rows: the words follow from rows of a trained embedding, exactly.
    problem: why there is no such row; "": there is.
    """

    label: str
    words: int = 0
    read: float = 0.0
    precision: float | None = None
    in_order: float | None = None
    by_rows: bool = False
    problem: str = ""


@frozen(kw_only=True)
class Worst:
    """The record of a round of which most was read. text: its tokens; read: the same, with a dash
    for each that was not read.
    """

    text: str
    read: str
    share: float


@frozen(kw_only=True)
class Findings:
    """An audit. readings: the first is of the run's own settings."""

    readings: tuple[Reading, ...]
    worst: Worst | None
    is_exact: bool
    positions: int
    member: Membership
    members: int
    others: int
    epsilon: tuple[float, float, float] | None
    """The epsilon of all rounds, the noise, and the sample rate; None: no bound."""
    merged: Membership | None = None
    """The same after `rounds` rounds of this site alone; None: not asked for."""
    rounds: int = 0
    exposures: tuple[tuple[int, float], ...] = ()
    """How often a code was planted, and its exposure in bits, of at most `most_exposure`."""
    most_exposure: float = 0.0


@frozen
class _Case:
    """A row of the report. code_step: of the run's own delta once more; 0: a round of its own."""

    label: str
    shape: Shape
    rule: AdapterRuleName
    dp_epsilon: float = 0.0
    code_step: float = 0.0


def cases_of(config: Config) -> list[_Case]:
    """The run's own round first, then others beside it."""
    tune, batch = config.tune, config.train.batch
    own = Shape(steps=tune.steps, batch=batch, private=bool(tune.dp_epsilon))
    found = [_Case("this run", own, tune.rule, tune.dp_epsilon)]
    if (config.codec.up_step or FINE_STEP) < 1 or config.codec.up != "uniform":
        found.append(evolve(found[0], label="this run at 2.2 bits a value", code_step=1.0))
    plain = evolve(one := Shape(steps=1, batch=1), sgd=True)
    found.append(_Case(f"{_round_of(plain)}, plain SGD", plain, tune.rule))
    for steps, records in sorted({(1, 1), (1, 4), (1, batch), (4, batch)}):
        shape = Shape(steps=steps, batch=records)
        if (steps, records) != (tune.steps, batch):
            found.append(_Case(_round_of(shape), shape, tune.rule))
    if tune.rule != "ffa":
        found.append(_Case(f"{_round_of(one)}, tune.rule = ffa", one, "ffa"))
    if not tune.dp_epsilon:
        private = Shape(steps=1, batch=batch, private=True)
        rule: AdapterRuleName = tune.rule if tune.rule in PRIVATE_RULES else "ffa"
        found.append(_Case(f"{_round_of(private)}, {rule}, epsilon 8", private, rule, 8.0))
    return found


def _round_of(shape: Shape) -> str:
    return f"{counted(shape.steps, 'step')} of {counted(shape.batch, 'record')}"


class Audit:
    """An audit of a site's records with a run's settings.

    make: makes the site's model by a configuration. say: takes a line about each step.
    trains_on: also what the model tells after more rounds, with planted codes in the data.
    Raises ConfigError and DataError in one line.
    """

    def __init__(
        self,
        config: Config,
        make: Callable[[Config], SiteRounds],
        say: Callable[[str], None],
        *,
        trains_on: bool = False,
    ) -> None:
        self._config, self._make, self._say, self._trains_on = config, make, say, trains_on

    def run(self) -> Findings:
        """Make every delta, attack them in one pass over the tokens, and measure membership."""
        own, *others = cases_of(self._config)
        site = self._site(own)
        delta = self._delta(own, site)
        sent: list[tuple[_Case, SentDelta | str]] = [(own, delta)]
        sites = {(own.rule, own.dp_epsilon): site}
        for case in others:
            key = case.rule, case.dp_epsilon
            if case.code_step:
                changes = site.coded(delta.trained, case.code_step)
                sent.append((case, evolve(delta, changes=changes)))
                continue
            try:
                of = sites[key] = sites.get(key) or self._site(case)
                sent.append((case, self._delta(case, of)))
            except ConfigError as error:
                sent.append((case, str(error)))
        layers = first_layers(site.model, site.longest)
        self._say("searches the deltas for words")
        readings, worst = self._read(layers, site, sent)
        self._say("looks for members")
        member, members = self._members(site, delta)
        more = self._after_rounds(site) if self._trains_on else {}
        return Findings(
            **more,
            readings=tuple(readings),
            worst=worst,
            is_exact=layers.is_exact,
            positions=layers.positions,
            member=member,
            members=members,
            others=len(site.held),
            epsilon=site.bound(),
        )

    def _site(self, case: _Case) -> SiteRounds:
        config = self._config
        tune = evolve(config.tune, rule=case.rule, dp_epsilon=case.dp_epsilon)
        run = config.run if config.run.rounds else evolve(config.run, rounds=USUAL_ROUNDS)
        return self._make(evolve(config, tune=tune, run=run if case.dp_epsilon else config.run))

    def _delta(self, case: _Case, site: SiteRounds) -> SentDelta:
        of = f" ({_round_of(case.shape)})" if case.label == "this run" else ""
        self._say(f"trains: {case.label}{of}")
        return site.send(case.shape)

    def _read(
        self, layers: FirstLayers, own: SiteRounds, sent: Sequence[tuple[_Case, SentDelta | str]]
    ) -> tuple[list[Reading], Worst | None]:
        deltas = [one for _, one in sent if isinstance(one, SentDelta)]
        mixtures = [layers.mixtures(one.changes) for one in deltas]
        by_pursuit = iter(pursue(mixtures, lambda: atoms(own.model, layers), MOST_TOKENS))
        special = frozenset(own.base.tokenizer.all_special_ids)
        readings, worst = [], None
        for case, delta in sent:
            if isinstance(delta, str):
                readings.append(Reading(label=case.label, problem=delta))
                continue
            found = [layers.place(number) for number in next(by_pursuit)]
            rows = _embedding_rows(own, delta)
            if rows is not None:
                found = [(token, -1) for token in rows]
            reading, read = _compared(
                case.label, delta, found, layers, special, by_rows=rows is not None
            )
            readings.append(reading)
            if case is sent[0][0]:
                worst = _worst(own, delta, read, special)
        return readings, worst

    def _members(self, site: SiteRounds, delta: SentDelta) -> tuple[Membership, int]:
        rows = np.unique(np.concatenate([batch.rows for batch in delta.batches]))
        members = site.mine.select(np.flatnonzero(np.isin(site.mine.rows, rows)))
        after = {name: site.version[name] + change for name, change in delta.changes.items()}
        return membership(*site.gains((members, site.held), site.version, after)), len(members)

    def _after_rounds(self, site: SiteRounds) -> dict[str, Any]:
        rounds = min(self._config.run.rounds or MOST_ROUNDS, MOST_ROUNDS)
        self._say(f"trains {rounds} rounds of this site alone")
        planted = site.codes() if self._config.tune.objective == "lm" else None
        after = site.train(rounds, planted)
        merged = membership(*site.gains((site.mine, site.held), site.first, after))
        found: dict[str, Any] = {"rounds": rounds, "merged": merged}
        if planted is not None:
            random = site.losses(planted.others).numpy()
            losses = zip(planted.copies, site.losses(planted.each).tolist(), strict=True)
            found["exposures"] = tuple((copies, exposure(loss, random)) for copies, loss in losses)
            found["most_exposure"] = float(np.log2(len(random) + 1))
        return found


def _embedding_rows(site: SiteRounds, delta: SentDelta) -> list[int] | None:
    """Tokens whose row of a trained input embedding changed.

    None: it does not train, or is the output's too, of which every row changes with every token.
    """
    embedding = site.model.get_input_embeddings().weight  # type: ignore[operator]
    for name, weight in site.model.named_parameters():
        if weight is embedding and name in delta.changes:
            rows: list[int] = delta.changes[name].any(dim=1).nonzero()[:, 0].tolist()
            return rows if 2 * len(rows) < len(weight) else None
    return None


def _compared(
    label: str,
    delta: SentDelta,
    found: Sequence[tuple[int, int]],
    layers: FirstLayers,
    special: Iterable[int],
    *,
    by_rows: bool,
) -> tuple[Reading, set[int]]:
    """Compare the tokens found with those of the records."""
    records, placed = delta.records, set(found)
    tokens = {token for record in records for token in record}
    tried = [pair[::-1] for record in records for pair in enumerate(record[: layers.positions])]
    words, read = tokens - set(special), {token for token, _ in found}
    return (
        Reading(
            label=label,
            words=len(words),
            read=len(read & words) / max(1, len(words)),
            precision=len(read & tokens) / len(read) if read else None,
            in_order=None if by_rows or layers.positions == 1 or not layers.is_exact
            else sum(pair in placed for pair in tried) / max(1, len(tried)),
            by_rows=by_rows,
        ),
        read,
    )  # fmt: skip


def _worst(
    site: SiteRounds, delta: SentDelta, read: set[int], special: frozenset[int]
) -> Worst | None:
    """The record of which most words were read, the longest of several."""
    records = [[token for token in one if token not in special] for one in delta.records]
    if not any(records):
        return None

    def share(words: list[int]) -> float:
        return sum(token in read for token in words) / max(1, len(words))

    worst = max(records, key=lambda words: (share(words), len(words)))
    shown = site.base.tokenizer.convert_ids_to_tokens(worst)
    kept = [text if token in read else "-" for text, token in zip(shown, worst, strict=True)]
    return Worst(text=" ".join(shown), read=" ".join(kept), share=share(worst))
