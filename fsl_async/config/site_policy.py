"""A site's own choices: what may leave it, its code, and its part in a tuning run. Pure.

The parameter server chooses a run's configuration, so the configuration alone must not decide
whether activations or labels leave a site. A client lists what may leave its machine (`--allow`, or
`allow` in site.toml beside its keys). It ends before it opens any data when a run needs more.

    kind          data
    deltas        changes of model weights, with their counts of tokens, samples and steps; initial
                  weights too
    adapters      the same of LoRA adapters only
    scalars       the projected gradients of zeroth-order steps, one number each
    sums          any of these three, but only under masks (`tune.secure`), so that the parameter
                  server reads sums of three or more sites
    activations   outputs of the lower part of a cut model, with the lengths of the sequences; in a
                  U-shape gradients too
    labels        labels of the data; for text the text itself, because labels are the next tokens
    metrics       loss and other numbers that training reports, and the errors of coding
    embeddings    an embedding that fine-tuning trains: its rows tell which words the records have
    copies        the site's single deltas, which the parameter server passes on to another site,
                  the run's evaluator
    answers       prompts, with all columns of their records, answers and rewards, which the
                  parameter server passes on to clients that train (`--rollout`)

Every client also sends what a session needs: its name, key and incarnation, its version with the
digest, names and shapes of the model's tensors, data shard, steps, tokens, speed, and why it leaves
(never the text of an exception). docs/SECURITY.md has the table of every field.

Nor must a parameter server choose which code of a client's machine runs: its configuration has
`own` where a run needs the user's code, and a client runs the file of its own command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import frozen

from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.config.settings_tuning import HEADS, TuneConfig
from fsl_async.errors import NotAllowedError, TaskError, UsageError
from fsl_async.roles.split.methods import METHODS
from fsl_async.roles.sync.delta import TRAIN

DELTAS, ADAPTERS, SCALARS, SUMS = "deltas", "adapters", "scalars", "sums"
ACTIVATIONS, LABELS, METRICS = "activations", "labels", "metrics"
EMBEDDINGS, COPIES, ANSWERS = "embeddings", "copies", "answers"
KINDS = (DELTAS, ADAPTERS, SCALARS, SUMS, ACTIVATIONS, LABELS, METRICS, EMBEDDINGS, COPIES, ANSWERS)
_WEIGHTS = frozenset({DELTAS, ADAPTERS, SCALARS})
_IMPLIED = {DELTAS: frozenset({ADAPTERS, SCALARS, SUMS}), ADAPTERS: frozenset({SCALARS})}
"""Kinds that another one includes."""


@frozen
class AuditLimits:
    """The most that an audit of this site's records may find; None: no limit.

    words_percent: of the words of a round, in percent. auc: of membership, 0.5 to 1.
    """

    words_percent: float | None = None
    auc: float | None = None


def parse_kinds(text: str | Iterable[str], where: str) -> frozenset[str]:
    """Read kinds from `a,b,c` or a list.

    Raises UsageError, which begins with `where`, when one is unknown or none is given.
    """
    given = text.split(",") if isinstance(text, str) else list(text)
    kinds = [kind.strip() if isinstance(kind, str) else "" for kind in given]
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong or not kinds:
        shown = f"{wrong[0][:40]!r} is no kind of data" if wrong else "no kind of data is given"
        raise UsageError(f"{where}: {shown}; the kinds are {', '.join(KINDS)}")
    return frozenset(kinds)


def listed(kinds: Iterable[str]) -> str:
    """Join kinds in their fixed order, as in messages and for `--allow`."""
    chosen = set(kinds)
    return ",".join(kind for kind in KINDS if kind in chosen)


@frozen
class SitePolicy:
    """The kinds that may leave this site.

    fix: how a person allows more, as the end of a sentence; `{kinds}` stands for the list.
    refuses_rollback: whether this site's clients end where their run goes back to an older version.
    """

    allowed: frozenset[str] = frozenset({DELTAS})
    fix: str = "to allow that, start this client with --allow {kinds}"
    refuses_rollback: bool = False

    def lets(self, kind: str, *, masked: bool = False) -> bool:
        """Whether this kind may leave. masked: deltas are, in this run."""
        if masked and kind in _WEIGHTS and SUMS in self.allowed:
            return True
        return kind in self.allowed or any(kind in _IMPLIED.get(one, ()) for one in self.allowed)

    def require(self, needed: Mapping[str, str], run: str, *, masked: bool = False) -> None:
        """Raise NotAllowedError unless all kinds of `needed` (kind -> receiver) may leave.

        It names the missing kinds, their receivers and the flag. masked: as in `lets`.
        """
        missing = [kind for kind in needed if not self.lets(kind, masked=masked)]
        if missing:
            receivers = dict.fromkeys(needed[kind] for kind in missing)
            names = {kind: kind for kind in missing}
            if SUMS in self.allowed:
                names |= {kind: f"{kind} without masks" for kind in _WEIGHTS}
            needs = " and ".join(
                f"{' and '.join(names[kind] for kind in missing if needed[kind] == to)} sent to"
                f" {to}"
                for to in receivers
            )
            fix = self.fix.format(kinds=listed({*self.allowed, *needed}))
            raise NotAllowedError(
                f"{run} needs {needs}, and this site allows {listed(self.allowed)} only; {fix}"
            )

    def leaving(self, needed: Iterable[str]) -> tuple[str, ...]:
        """Return the kinds that leave in a run: the needed ones, and metrics where allowed."""
        chosen = {*needed, METRICS} if self.lets(METRICS) else set(needed)
        return tuple(kind for kind in KINDS if kind in chosen)


def needs_of(config: Config) -> tuple[str, ...]:
    """Return the kinds that every client of a run with this configuration sends."""
    split, tune = config.split, config.tune
    copies = (COPIES,) if config.guard.evaluator else ()
    if tune.is_on:
        # The head of a classifier is new, and is exchanged whole.
        whole = bool(tune.full) or (tune.objective in HEADS and not tune.has_own_head)
        orders = (SCALARS,) if tune.method == "zeroth" else ()
        return orders or ((DELTAS,) if whole else (ADAPTERS,)) + copies
    # Linear auxiliary models and the user's own have no adapters: all of their weights are sent.
    has_auxiliary = split.is_on and METHODS[split.method].auxiliary != "none"
    auxiliary = has_auxiliary and not split.auxiliary.startswith("blocks")
    weights = ADAPTERS if split.is_on and split.lora_client and not auxiliary else DELTAS
    if not split.has_server:
        return (weights, *copies)
    return (weights, ACTIVATIONS) if split.labels_at_home else (weights, ACTIVATIONS, LABELS)


def receivers_of(
    config: Config, ps: str, split_server: str, *, is_zeroth: bool = False
) -> dict[str, str]:
    """Return the needed kinds with their receivers, `ps` or `split_server`, as text.

    is_zeroth: this client sends scalars, whatever others of the run send.
    """
    servers = f"the parameter server at {ps}", f"the split server at {split_server}"
    needed = (SCALARS,) if is_zeroth else needs_of(config)
    receivers = {kind: servers[kind not in _WEIGHTS] for kind in needed}
    if COPIES in receivers:
        receivers[COPIES] = f"the run's evaluator {config.guard.evaluator}"
    return receivers


Order = Literal["first", "zeroth"]


@frozen(kw_only=True)
class SiteChoices:
    """Choices of a client's command line for its model.

    The parameter server fixes rank, rule and objective of a run that tunes a base model; where the
    base is on a site's disk, and how much of it the site trains, is up to the site.
    """

    base: str = ""
    """Folder or file of the base model."""
    rank: int = 0
    """Rank of its adapters; 0: the run's."""
    order: Order | None = None
    """Order of its steps; None: by the run's method."""
    layers: str = ""
    """Numbers of the blocks that it trains, like "0-2,5"; empty: all."""
    duty: str = TRAIN
    """Its duty in the run: one of those in `fsl_async.roles.sync.delta`."""
    reward: str = ""
    """Its function that rates answers, as file.py or file.py:function (grpo)."""
    columns: str = ""
    """Columns of its records, like "text=BODY"; empty: by their usual names."""
    model: str = ""
    """Split learning: the site's own model, as file.py:function."""
    auxiliary: str = ""
    """The site's own auxiliary model."""

    def check_code(self, config: Config) -> None:
        """Raise TaskError where the run needs code that this site did not give."""
        needed = {
            "--model": ("model.family", config.model.family, self.model),
            "--auxiliary": ("split.auxiliary", config.split.auxiliary, self.auxiliary),
        }
        for option, (key, value, given) in needed.items():
            if is_own(value) and not given:
                raise TaskError(
                    f"this run has a {key} of its own: give this client its copy with {option}"
                    " FILE.py:FUNCTION"
                )

    def rank_in(self, tune: TuneConfig, *, unequal: bool) -> int:
        """Return the rank of this site's adapters. TaskError: the run cannot have it.

        unequal: whether the run's rule merges adapters of several ranks.
        """
        most = tune.adapter_rank
        if not self.rank or self.rank == most:
            return most
        if self.rank > most:
            raise TaskError(f"--rank {self.rank}: the run's adapters have rank {most} (tune.rank)")
        if not unequal:
            raise TaskError(
                f"--rank {self.rank}: all sites of a run with tune.rule = {tune.rule} have rank"
                f" {most}; ranks of its own need tune.rule = bank"
            )
        return self.rank

    def is_zeroth(self, tune: TuneConfig) -> bool:
        """Whether this site estimates gradients from losses."""
        return tune.method == "zeroth" or self.order == "zeroth"
