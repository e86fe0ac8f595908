"""Makes the deltas of an audit, attacks them, and gathers what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from fsl_async.config.settings import FINE_STEP, Config
from fsl_async.config.settings_tuning import PRIVATE_RULES, AdapterRuleName
from fsl_async.errors import ConfigError
from fsl_async.tools.audit.inputs import FirstLayers, atoms, first_layers
from fsl_async.tools.audit.membership import Membership, exposure, membership
from fsl_async.tools.audit.pursuit import Pursuit
from fsl_async.tools.audit.site_round import SentDelta, Shape, SiteRounds

MOST_TOKENS = 512
"""Tokens that a pursuit looks for in one delta."""
MOST_ROUNDS = 10
"""Rounds after which the model of the site alone is looked at."""


@frozen(kw_only=True)
class Reading:
    """What an attack read in one delta. Shares are of 0 to 1.

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
    label: str
    rule: AdapterRuleName
    shape: Shape
    dp_epsilon: float = 0.0


def cases_of(config: Config) -> list[_Case]:
    """The run's own round first, then others beside it."""
    tune, batch = config.tune, config.train.batch
    own = Shape(steps=tune.steps, batch=batch, private=bool(tune.dp_epsilon))
    rule = tune.rule
    found = [_Case("this run", rule, own, tune.dp_epsilon)]

    def beside(label: str, *, of: AdapterRuleName = rule, **changed: Any) -> None:
        shape = evolve(own, private=False, **changed)
        found.append(_Case(label, of, shape))

    beside("1 step of 1 record, plain SGD", steps=1, batch=1, sgd=True)
    beside("1 step of 1 record", steps=1, batch=1)
    if batch != 4:
        beside("1 step of 4 records", steps=1, batch=4)
    for steps in (1, 4, 16):
        # Where a round is longer anyhow, one more long row tells nothing.
        if steps != tune.steps and (steps, batch) != (1, 1) and (steps < 16 or tune.steps < 8):
            beside(f"{steps} step{'s' if steps > 1 else ''} of {batch} records", steps=steps)
    if (config.codec.up_step or FINE_STEP) < 1 or config.codec.up != "uniform":
        beside("this run at 2.2 bits a value", code_step=1.0)
    if rule != "ffa":
        beside("this run with tune.rule = ffa", of="ffa")
    if not tune.dp_epsilon:
        private: AdapterRuleName = rule if rule in PRIVATE_RULES else "ffa"
        found.append(_Case(f"{private} with epsilon 8", private, evolve(own, private=True), 8.0))
    return found


class Audit:
    """An audit of a site's records with a run's settings.

    make: makes the site's model by a configuration. say: is told what is done, in one line.
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
        cases = cases_of(self._config)
        by_rule: dict[tuple[str, float], SiteRounds] = {}
        sent: list[tuple[_Case, SiteRounds | None, SentDelta | None, str]] = []
        for case in cases:
            key = case.rule, case.dp_epsilon
            try:
                site = by_rule.get(key)
                if site is None:
                    tune = evolve(self._config.tune, rule=case.rule, dp_epsilon=case.dp_epsilon)
                    site = by_rule[key] = self._make(evolve(self._config, tune=tune))
                self._say(f"trains: {case.label}")
                sent.append((case, site, site.send(case.shape), ""))
            except ConfigError as error:
                if case is cases[0]:
                    raise
                sent.append((case, None, None, str(error)))
        own = sent[0][1]
        assert own is not None
        layers = first_layers(own.model, own.longest)
        self._say("searches the deltas for words")
        readings, worst = self._read(layers, own, sent)
        self._say("looks for members")
        delta = sent[0][2]
        assert delta is not None
        member, members = self._members(own, delta)
        more = self._after_rounds(own) if self._trains_on else {}
        return Findings(
            **more,
            readings=tuple(readings),
            worst=worst,
            is_exact=layers.is_exact,
            positions=layers.positions,
            member=member,
            members=members,
            others=len(own.held),
            epsilon=own.bound(),
        )

    def _read(
        self,
        layers: FirstLayers,
        own: SiteRounds,
        sent: Sequence[tuple[_Case, SiteRounds | None, SentDelta | None, str]],
    ) -> tuple[list[Reading], Worst | None]:
        pursuits = [
            None if one is None else Pursuit(layers.mixtures(one.changes)) for _, _, one, _ in sent
        ]
        for block in atoms(own.model, layers):
            for pursuit in pursuits:
                if pursuit is not None:
                    pursuit.offer(block)
        special = frozenset(own.base.tokenizer.all_special_ids)
        readings, worst = [], None
        for (case, site, delta, problem), pursuit in zip(sent, pursuits, strict=True):
            if site is None or delta is None or pursuit is None:
                readings.append(Reading(label=case.label, problem=problem))
                continue
            rows = _embedding_rows(site, delta)
            if rows is None:
                found = [layers.place(one.number) for one in pursuit.found(MOST_TOKENS)]
            else:
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
        places = np.flatnonzero(np.isin(site.mine.rows, rows))
        members = site.mine.select(places)
        site.set(site.version)
        before = [site.losses(part) for part in (members, site.held)]
        site.set({name: site.version[name] + change for name, change in delta.changes.items()})
        after = [site.losses(part) for part in (members, site.held)]
        site.set(site.version)
        scores = [(old - new).numpy() for old, new in zip(before, after, strict=True)]
        return membership(scores[0], scores[1]), len(members)

    def _after_rounds(self, site: SiteRounds) -> dict[str, Any]:
        rounds = min(self._config.run.rounds or MOST_ROUNDS, MOST_ROUNDS)
        self._say(f"trains {rounds} rounds of this site alone")
        site.set(site.first)
        before = [site.losses(part) for part in (site.mine, site.held)]
        planted = site.codes() if self._config.tune.objective == "lm" else None
        site.train(rounds, planted)
        after = [site.losses(part) for part in (site.mine, site.held)]
        scores = [(old - new).numpy() for old, new in zip(before, after, strict=True)]
        found: dict[str, Any] = {"rounds": rounds, "merged": membership(scores[0], scores[1])}
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
    """What was found beside what the records have."""
    tokens: set[int] = set()
    placed = {(token, place) for token, place in found}
    tried = in_place = 0
    for batch in delta.batches:
        tokens.update(batch.ids[batch.mask > 0].tolist())
        for ids, mask in zip(batch.ids.tolist(), batch.mask.tolist(), strict=True):
            for place, (token, real) in enumerate(zip(ids, mask, strict=True)):
                if real and place < layers.positions:
                    tried += 1
                    in_place += (token, place) in placed
    everything, words = tokens, tokens - set(special)
    read = {token for token, _ in found}
    return (
        Reading(
            label=label,
            words=len(words),
            read=len(read & words) / max(1, len(words)),
            precision=len(read & everything) / len(read) if read else None,
            in_order=None if by_rows or layers.positions == 1 or not layers.is_exact
            else in_place / max(1, tried),
            by_rows=by_rows,
        ),
        read,
    )  # fmt: skip


def _worst(
    site: SiteRounds, delta: SentDelta, read: set[int], special: frozenset[int]
) -> Worst | None:
    """The record of which most words were read, the longest of several."""
    best: tuple[float, int, list[int]] | None = None
    for batch in delta.batches:
        for ids, mask in zip(batch.ids.tolist(), batch.mask.tolist(), strict=True):
            words = [
                token
                for token, real in zip(ids, mask, strict=True)
                if real and token not in special
            ]
            if not words:
                continue
            share = sum(token in read for token in words) / len(words)
            if best is None or (share, len(words)) > best[:2]:
                best = share, len(words), words
    if best is None:
        return None
    share, _, words = best
    shown = site.base.tokenizer.convert_ids_to_tokens(words)
    kept = [text if token in read else "-" for text, token in zip(shown, words, strict=True)]
    return Worst(text=" ".join(shown), read=" ".join(kept), share=share)
