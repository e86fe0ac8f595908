"""Checks the invariants (docs/ARCHITECTURE.md) after every event of a simulated run.

The simulator has access to every snapshot of a training thread and everything on a disk. After each
event of each node the checks below run on what that event touched, in constant time, so a day of a
thousand clients can be checked completely.

- A delta is merged at most once, carries the base it was computed from, and is never recomputed
  against another.
- An acknowledged delta is on the parameter server's disk from then on, through every crash.
- Tokens in the ledger are the tokens that clients trained and sent.
- All nodes at a version hold the same digest; there is one lineage; its version 0 is published
  once.
- What a client trained is in exactly one place: acknowledged, outstanding, refused, or not sent
  yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, mutable

from fsl_async.roles.machine import Event, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.tools.sim.counting import CountingLearner, Disk, Model


@mutable
class Invariants:
    """What happened, and the violations found."""

    disk: Disk
    violations: list[str] = field(factory=list)
    deltas_doubled: int = 0
    deltas_lost: int = 0
    tokens_unsent: int = 0
    """Tokens trained and not sent at the end of the run, by the clients present."""
    _offered: dict[DeltaKey, Delta] = field(factory=dict)
    _acknowledged: set[DeltaKey] = field(factory=set)
    _refused: set[DeltaKey] = field(factory=set)
    _versions_seen: int = 0
    _accounts: dict[tuple[str, int], dict[str, int]] = field(factory=dict)

    def violated(self, text: str, now: float) -> None:
        """Record a violation."""
        self.violations.append(f"at {now:.3f} s: {text}")

    # --- at a server ---

    def after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Any], now: float
    ) -> None:
        """Check what an event of the parameter server may have touched."""
        if isinstance(event, ev.VersionCommitted):
            self._check_new_versions(now)
        if machine.version >= 0 and self.disk.models:
            newest = self.disk.models[-1]
            if machine.version > newest.version:
                self.violated(
                    f"server believes in version {machine.version}, disk has {newest.version}", now
                )
            elif self.disk.models[machine.version].digest != machine.digest:
                self.violated(f"server holds another digest of version {machine.version}", now)
        for effect in effects:
            if isinstance(effect, Send) and effect.message.tag == "accepted/1":
                key = effect.message.key  # type: ignore[attr-defined]
                if key not in self.disk.pending and key not in self.disk.merged:
                    self.violated(f"acknowledged delta {key.text} is not durable", now)

    def _check_new_versions(self, now: float) -> None:
        models = self.disk.models
        tokens = models[-1].total - models[0].total
        if tokens != self.disk.tokens_merged:
            self.violated(
                f"version {models[-1].version} holds {tokens} tokens, ledger "
                f"{self.disk.tokens_merged}",
                now,
            )
        for position in range(self._versions_seen, len(models)):
            if models[position].version != position:
                self.violated(f"version {models[position].version} follows {position - 1}", now)
        self._versions_seen = len(models)

    def server_died(self, now: float) -> None:
        """Check after a crash that everything acknowledged is on disk."""
        lost = [
            k
            for k in self._acknowledged
            if k not in self.disk.pending and k not in self.disk.merged
        ]
        for key in lost:
            self.violated(f"acknowledged delta {key.text} is lost", now)
        self.deltas_lost += len(lost)

    def run_ended(
        self, learners: Mapping[str, CountingLearner], names: Sequence[str], now: float
    ) -> None:
        """Check after an orderly end that every client has the last version, with all its work in
        it.
        """
        last = self.disk.models[-1]
        for name in names:
            learner = learners.get(name)
            if learner is None:
                self.violated(f"{name} did not end with its run", now)
            elif learner.model != last:
                text = f"{name} ended with version {learner.model.version}, not {last.version}"
                self.violated(text, now)
            else:
                self.tokens_unsent += learner.trained_tokens - learner.sent_tokens
        for key in self.disk.pending:
            self.violated(f"acknowledged delta {key.text} is not in the last version", now)

    def delta_merged(self, key: DeltaKey, now: float) -> None:
        """Record that a delta is merged into a version."""
        if key in self.disk.merged:
            self.deltas_doubled += 1
            self.violated(f"delta {key.text} is merged twice", now)

    # --- at a client ---

    def after_client(
        self,
        machine: ClientMachine,
        learner: CountingLearner,
        event: Event,
        effects: list[Any],
        now: float,
    ) -> None:
        """Check what an event of a client may have touched."""
        for effect in effects:
            if isinstance(effect, do.OfferDelta):
                self._offered_again(effect.delta, now)
        if isinstance(event, ev.DeltaAcknowledged):
            stored = self.disk.pending.get(event.key)
            offered = self._offered.get(event.key)
            if stored is None and event.key not in self.disk.merged:
                self.violated(
                    f"{machine.name} received that {event.key.text} is durable; it is not", now
                )
            elif offered is None or (stored is not None and stored.delta.tokens != offered.tokens):
                self.violated(
                    f"tokens of {event.key.text} are not what {machine.name} trained", now
                )
            elif event.key not in self._acknowledged:
                self._acknowledged.add(event.key)
                self._account(event.key)["acknowledged"] += offered.tokens
        elif (
            isinstance(event, ev.DeltaRefused)
            and event.key in self._offered
            and event.code != "later"
            and event.key not in self._refused
        ):
            self._refused.add(event.key)
            self._account(event.key)["refused"] += self._offered[event.key].tokens
        elif isinstance(event, ev.BaseReplaced | ev.Rebased):
            self._holds(machine.name, learner.base, now)
        if isinstance(event, ev.DeltaAcknowledged | ev.DeltaRefused | ev.Snapshotted):
            self._balance(machine, learner, now)

    def _offered_again(self, delta: Delta, now: float) -> None:
        key = delta.key
        before = self._offered.setdefault(key, delta)
        if before is delta:
            models = self.disk.models
            if key.base < len(models) and models[key.base].digest != delta.base_digest:
                self.violated(f"delta {key.text} names a base of another lineage", now)
        elif before != delta:
            self.violated(f"delta {key.text} was recomputed", now)

    def _holds(self, name: str, model: Model, now: float) -> None:
        if model.version < 0:
            return
        if model.version >= len(self.disk.models):
            self.violated(f"{name} holds version {model.version}, which does not exist", now)
        elif self.disk.models[model.version] != model:
            self.violated(f"{name} holds something else than version {model.version}", now)

    def _account(self, key: DeltaKey) -> dict[str, int]:
        """Return the counts of the incarnation that computed `key`; its successor may receive the
        outcome.
        """
        identity = (key.client, key.incarnation)
        return self._accounts.setdefault(identity, {"acknowledged": 0, "refused": 0})

    def _balance(self, machine: ClientMachine, learner: CountingLearner, now: float) -> None:
        account = self._account(DeltaKey(machine.name, machine.incarnation, 0, 0))
        outstanding = machine.delta.tokens if machine.delta is not None else 0
        sent = account["acknowledged"] + account["refused"] + outstanding
        if sent != learner.sent_tokens:
            self.violated(
                f"{machine.name} copied {learner.sent_tokens} tokens, {sent} are accounted for",
                now,
            )
