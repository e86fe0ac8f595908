"""Runs the jobs of a parameter server's store besides streams: clients, deltas, versions.

`ParameterServerContext` holds the parts that the shell, its streams and its groups use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from fsl_async.roles.machine import Done, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.membership import MOST_SHARDS
from fsl_async.store.errors import Damaged

if TYPE_CHECKING:
    from fsl_async.accounting.sizes import Direction
    from fsl_async.nodes.runtime import Journal, Node, Worker
    from fsl_async.roles.machine import Event
    from fsl_async.roles.sync.ps import ParameterServerMachine
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.store import Store
    from fsl_transport import ListenerEndpoint, Scheduler


def _limit(shards: int) -> int:
    return shards or MOST_SHARDS


@define(eq=False, slots=False)
class StoreJobs:
    """Carries out effects with the store. number: of the effect, for the event that it ends in.

    shards: of the run's data; 0 where it is not divided. after_commit: called in the worker with
    each version made here, before it is announced; it must not raise. on_version: takes version 0,
    and each one made of deltas, after the machine.
    """

    _store: Store
    worker: Worker
    _feed: Callable[[Event, int | None], None]
    _shards: int = field(converter=_limit)
    _scheduler: Scheduler
    _say: Callable[[Note], None]
    _after_commit: Callable[[int], None] | None = None
    _on_version: Callable[[int], None] = lambda _: None

    def admit(self, effect: do.Admit, number: int) -> None:
        """Write the incarnation and the provisional lease of a client to disk."""
        peer, incarnation = effect.peer, effect.incarnation

        def write() -> None:
            self._store.run.record_incarnation(peer, incarnation)
            if effect.shard is not None:
                self._store.run.lease(peer, self._shards, effect.shard, provisional=True)

        self.worker.submit(
            write,
            lambda _: self._feed(Done(effect), number),
            lambda error: self._feed(Done.failed(effect, error), number),
        )

    def keep_shard(self, effect: do.KeepShard, number: int) -> None:
        """Write to disk that a client's lease is permanent."""
        self.worker.submit(
            lambda: self._store.run.lease(effect.peer, self._shards),
            lambda _: self._feed(Done(effect), number),
            lambda error: self._feed(Done.failed(effect, error), number),
        )

    def keep_decay(self, effect: do.KeepDecay, number: int) -> None:
        """Write to disk that learning rates fall."""
        self._write(lambda: self._store.run.record_decay(effect.decay), number, Done(effect))

    def keep_sum(self, effect: do.KeepSum, number: int) -> None:
        """Write to disk which sites a secure sum will be of."""
        run = self._store.run
        self._write(lambda: run.record_sum(effect.roster, effect.survivors), number, Done(effect))

    def open_sum(self, effect: do.OpenSum, number: int) -> None:
        """Add up masked deltas."""
        self.worker.submit(
            lambda: self._store.open_sum(effect.keys, effect.answers),
            lambda rms: self._feed(ev.SumOpened(rms), number),
            lambda error: self._feed(ev.SumOpened(0.0, str(error)), number),
        )

    def quarantine(self, effect: do.Quarantine, number: int) -> None:
        """Exclude a delta from the run."""
        self._write(
            lambda: self._store.run.quarantine(effect.key, effect.reason, held=effect.held), number
        )

    def release(self, effect: do.Release, number: int) -> None:
        """Make a held delta pending again."""
        self._write(lambda: self._store.run.release(effect.key), number)

    def _write(self, job: Callable[[], None], number: int, then: Event | None = None) -> None:
        """Write to the ledger, then report `then`; if that fails, the machine gets StoreFailed."""

        def written(_: None) -> None:
            if then is not None:
                self._feed(then, number)

        self.worker.submit(
            job,
            written,
            lambda error: self.failed(
                f"the ledger cannot be written: {error}: start the parameter server again", number
            ),
        )

    def commit(self, effect: do.Commit, number: int) -> None:
        """Make the next version."""
        begun_at = self._scheduler.time()

        def commit() -> ev.VersionCommitted:
            made = self._store.commit(
                effect.version, effect.merged, effect.scale, effect.position, reused=effect.reused
            )
            if self._after_commit is not None:
                self._after_commit(made.version)
            return made

        self.worker.submit(
            commit,
            lambda made: self.committed(made, begun_at, number),
            lambda error: self._commit_failed(effect, error, number),
        )

    def _commit_failed(self, effect: do.Commit, error: Exception, number: int) -> None:
        if isinstance(error, Damaged):  # trying again would find it again
            self.failed(f"version {effect.version} cannot be made: {error}", number)
        else:
            self._feed(Done.failed(effect, error), number)

    def committed(self, made: ev.VersionCommitted, begun_at: float, number: int) -> None:
        """Report a durable version."""
        if made.notice:
            self._say(Note(made.notice, "warning"))
        for key in made.late:
            text = (
                f"delta {key.text} is left out of version {made.version}: it was stored too late"
                f" for its round, which version {key.base} began"
            )
            self._say(Note(text, "warning"))
        self._feed(evolve(made, seconds=self._scheduler.time() - begun_at), number)
        if made.made_of == "deltas":
            self._on_version(made.version)

    def verify(self, effect: do.VerifyVersion, number: int) -> None:
        """Verify every byte of a version."""
        self.worker.submit(
            lambda: self._store.verify(effect.version),
            lambda intact: self._feed(Done(effect, "" if intact else "it was damaged"), number),
            lambda error: self.read_failed(error, number),
        )

    def read_failed(self, error: Exception, number: int) -> None:
        """Report a failed read. Damage ends this process; after another error fetches go on."""
        if isinstance(error, Damaged):
            self.failed(str(error), number)
        else:
            self._say(Note(f"cannot read a version: {error}", "warning"))

    def failed(self, reason: str, number: int | None = None) -> None:
        """Report to the machine that the store is unusable."""
        self._feed(ev.StoreFailed(reason), number)


@define(eq=False, kw_only=True)
class ParameterServerContext:
    """The parts of a parameter server that its shell, its streams and its groups use."""

    machine: ParameterServerMachine
    node: Node
    endpoint: ListenerEndpoint
    store: Store
    worker: Worker
    scheduler: Scheduler
    journal: Journal
    jobs: StoreJobs
    say: Callable[[Note], None]
    manifest: Manifest | None = None
    """The run's manifest; None until a client has attached a model."""
    _count: Callable[[Manifest, Direction, int, bytes], None]

    def known_manifest(self) -> Manifest:
        """Return the run's manifest, once a client has attached a model."""
        assert self.manifest is not None, "a client has attached a model"
        return self.manifest

    def count(self, direction: Direction, index: int, frame: bytes) -> None:
        """Count a chunk of weights."""
        if self.manifest is not None:
            self._count(self.manifest, direction, index, frame)
