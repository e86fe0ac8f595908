"""Checks that a run sends only the kinds of data that a client's site allows. Pure.

The parameter server chooses a run's configuration, so the configuration alone must not decide
whether activations or labels leave a site. A client lists what may leave its machine (`--allow`, or
`allow` in site.toml beside its keys). It ends before it opens any data when a run needs more.

    kind          data
    deltas        changes of model weights, with their counts of tokens, samples and steps; initial
                  weights too
    adapters      the same of LoRA adapters only
    scalars       the projected gradients of zeroth-order steps, one number each
    activations   outputs of the lower part of a cut model, with the lengths of the sequences; in a
                  U-shape gradients too
    labels        labels of the data; for text the text itself, because labels are the next tokens
    metrics       loss and other numbers that training reports, and the errors of coding

Every client also sends what a session needs: its name, key and incarnation, its version with the
digest, names and shapes of the model's tensors, data shard, steps, tokens, speed, and why it leaves
(never the text of an exception). docs/SECURITY.md has the table of every field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from fsl_async.config.settings import Config
from fsl_async.errors import NotAllowedError, UsageError
from fsl_async.roles.split.methods import METHODS

DELTAS, ADAPTERS, SCALARS = "deltas", "adapters", "scalars"
ACTIVATIONS, LABELS, METRICS = "activations", "labels", "metrics"
KINDS = (DELTAS, ADAPTERS, SCALARS, ACTIVATIONS, LABELS, METRICS)
_IMPLIED = {DELTAS: frozenset({ADAPTERS, SCALARS}), ADAPTERS: frozenset({SCALARS})}
"""Kinds that another one includes."""


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
    """Join kinds in their fixed order, for people and for `--allow`."""
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

    def lets(self, kind: str) -> bool:
        """Whether this kind may leave."""
        return kind in self.allowed or any(kind in _IMPLIED.get(one, ()) for one in self.allowed)

    def require(self, needed: Mapping[str, str], run: str) -> None:
        """Raise NotAllowedError unless all kinds of `needed` (kind -> receiver) may leave.

        It names the missing kinds, their receivers and the flag.
        """
        missing = [kind for kind in needed if not self.lets(kind)]
        if missing:
            receivers = dict.fromkeys(needed[kind] for kind in missing)
            needs = " and ".join(
                f"{' and '.join(kind for kind in missing if needed[kind] == to)} sent to {to}"
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
    if tune.is_on:
        # The head of a classifier is new, and is exchanged whole.
        whole = bool(tune.full) or tune.objective == "classify"
        orders = (SCALARS,) if tune.method == "zeroth" else ()
        return orders or ((DELTAS,) if whole else (ADAPTERS,))
    # Linear auxiliary models and the user's own have no adapters: all of their weights are sent.
    has_auxiliary = split.is_on and METHODS[split.method].auxiliary != "none"
    auxiliary = has_auxiliary and not split.auxiliary.startswith("blocks")
    weights = ADAPTERS if split.is_on and split.lora_client and not auxiliary else DELTAS
    if not split.has_server:
        return (weights,)
    return (weights, ACTIVATIONS) if split.labels_at_home else (weights, ACTIVATIONS, LABELS)


def receivers_of(
    config: Config, ps: str, split_server: str, *, is_zeroth: bool = False
) -> dict[str, str]:
    """Return the needed kinds with their receivers, `ps` or `split_server`, as text for people.

    is_zeroth: this client sends scalars, whatever others of the run send.
    """
    weights = {DELTAS, ADAPTERS, SCALARS}
    servers = f"the parameter server at {ps}", f"the split server at {split_server}"
    needed = (SCALARS,) if is_zeroth else needs_of(config)
    return {kind: servers[kind not in weights] for kind in needed}
