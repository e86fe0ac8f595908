"""Store: the parameter server's durable state, one run directory.

    run_dir/ledger.jsonl     what was acknowledged (fsl_async.store.disk.ledger)
    run_dir/manifest.json    the model's tensors
    run_dir/spool/           deltas as they arrived (fsl_async.store.deltas.spool)
    run_dir/quarantine/      deltas that must not be merged
    run_dir/checkpoints/     the last few versions (fsl_async.store.versions.checkpoint)

The newest version's vectors are in memory, or mapped where memory is short: a commit advances them
and writes the coded change, and a snapshot of them follows between commits
(fsl_async.store.commit.newest).

Rules, which hold whenever the process dies, at any call to the disk:
1. An acknowledged delta (`spool_finish` returned) is merged in exactly one version of the lineage,
   or pending, or quarantined.
2. A version exists from the rename of its folder on. Its manifest.json lists what it merged, so
   nothing is merged twice; the ledger's version line comes after it, and recovery writes the line
   if the crash fell between the two.
3. A version that `commit` returned stays, with the digest that it returned.
4. When a call fails (disk full), nothing has changed, and it can be tried again. One exception: a
   delta whose sync failed is dropped, and its client sends it again.

Everything here is synchronous and runs in one worker thread; `threads` others help it with chunks,
and are idle when a call returns; another one writes checkpoints. It holds the newest version's
vectors and a few chunks. Methods raise StoreError (or a subclass) when the disk or the order of
calls is at fault, and FrameRefused when a peer's bytes are.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from fsl_async.files.files import Files
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.delta import StoredDelta
from fsl_async.roles.sync.events import DeltaStored, Recovered, VersionCommitted
from fsl_async.store.book.records import recordable, to_fact
from fsl_async.store.commit.groups_store import GroupsStore
from fsl_async.store.commit.merging import AT_START, Merging, merge_of
from fsl_async.store.commit.newest import Newest, oldest_needed
from fsl_async.store.deltas.seed_step import frame_of
from fsl_async.store.errors import ManifestError, StoreError, disk
from fsl_async.store.recovery.recovery import open_run_directory, recovered
from fsl_async.store.recovery.run_directory import RunDirectory
from fsl_async.store.rules.adapters import adapter_modules, has_adapters
from fsl_async.store.settings import StoreSettings
from fsl_async.store.vectors.memory import Mapped, anonymous, memory_lacking
from fsl_async.store.vectors.vectors import LOSSLESS
from fsl_async.store.versions.checkpoint import InitialWeights
from fsl_codecs import CodecError, decode_into, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike
    from fsl_async.roles.groups.events import Decision
    from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, Outcome
    from fsl_async.roles.sync.progress import RunPosition
    from fsl_async.roles.sync.roster import Answers
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.deltas.delta_kind import DeltaKind
    from fsl_async.store.disk.chunk_files import FrameReader
    from fsl_async.store.merge.merge_upstream import Upstream
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.versions.checkpoint import Checkpoint


@frozen
class _Open:
    """The parts of an open store."""

    run: RunDirectory
    groups: GroupsStore
    newest: Newest | None = None
    """The vectors, and the round that makes the next ones: from version 0 on."""
    merging: Merging | None = None


class Store:
    """The durable state of one run. Call `recover` first, `close` last.

    from_version: rolls back to that version: later ones are renamed, and deltas that only they had
    merged are pending again, or quarantined (leave_out: see `Book.rollback_to`).
    only_facts: no version will be read or made, so none is loaded or removed.
    later: see `Snapshots`.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: StoreSettings | None = None,
        *,
        from_version: int | None = None,
        leave_out: Mapping[str, str] | None = None,
        only_facts: bool = False,
        files: Files | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._settings = settings or StoreSettings()
        self._run_dir = run_dir
        self._from_version = from_version
        self._leave_out = leave_out or {}
        self._only_facts = only_facts
        self._files = files or Files()
        self._wall_clock = wall_clock
        self._clock = clock
        self._later = later
        self._parts: _Open | None = None
        self._initial: InitialWeights | None = None
        self._serving_from: int | None = None
        self._served_full = -1
        """The newest version of which weights were read for a client."""
        self.report: Callable[[str], None] = lambda _: None
        """Receives one line about each damage that was repaired, or that costs only bandwidth.

        Called in the store's thread.
        """
        self.gone: Callable[[str], None] = lambda _: None
        """Receives one line when the run cannot go on: its ledger or its directory is gone."""
        self._unsaved = ""
        """The last line about removed files."""
        self._is_starting = False
        self.notices: list[str] = []
        """Receives what `recover` finds and repairs, one line each."""

    # --- start and end ---

    def recover(self) -> Recovered:
        """Read the run directory, or create it, verify and repair.

        Raises CheckpointDamaged, LedgerDamaged, StoreError (also when another process uses the
        directory).
        """
        self.close()
        self._is_starting, self.notices = True, []
        try:
            run = self._opened()
        finally:
            self._is_starting = False
        return recovered(run, self._open.groups.update_base)

    def _opened(self) -> RunDirectory:
        """Open the run directory, and load its newest version."""
        run = RunDirectory(
            self._files,
            self._run_dir,
            self._settings,
            report=self._report,
            gone=lambda line: self.gone(line),  # noqa: PLW0108 - it may be set later
            # A rollback's line has all that any settings may use again.
            reuse=2**31 if self._only_facts else None,
            wall_clock=self._wall_clock,
            clock=self._clock,
        )
        with disk(f"cannot open the run directory {self._run_dir}"):
            open_run_directory(
                run, self._from_version, self._leave_out, only_facts=self._only_facts
            )
        self._parts = _Open(run, GroupsStore(run, self._weights_chunk))
        if not self._only_facts:
            if run.model is not None:
                self._load_newest()
            with disk(f"cannot tidy the run directory {self._run_dir}"):
                for path in run.retire(self._forget_old()):
                    self._files.remove_any(path)
        return run

    def _load_newest(self) -> None:
        """Load the newest version, to go on from it. Raises CheckpointDamaged, StoreError."""
        opened, settings = self._open, self._settings
        run = opened.run
        more = (
            settings.may_keep_mean + settings.keeps_owed + max(0, len(settings.outer.vectors) - 1)
        )
        lacking = memory_lacking(run.manifest.values, more) if settings.resident else ""
        if lacking:
            self._report(lacking)
        is_mapped = bool(lacking) or not settings.resident
        allocate = Mapped(self._run_dir) if is_mapped else anonymous
        merge = merge_of(run)
        newest = Newest(run, merge, allocate, self._later)
        with disk(f"cannot read version {self.version}"):
            newest.recover()
        newest.begin_snapshot(run.kept.get(self.version))
        merging = Merging(run, newest, merge, self._is_fetched_in_full)
        self._parts = evolve(opened, newest=newest, merging=merging)

    def _is_fetched_in_full(self) -> bool:
        return self._served_full == self.version and (
            self._serving_from is not None and self._serving_from <= self.version
        )

    def _report(self, line: str) -> None:
        if self._is_starting:
            self.notices.append(line)
            return
        with suppress(StoreError):  # that is the cause, and is reported
            self._open.run.ledger.check()
            self.report(line)  # which may be set later than the store is opened

    def close(self) -> None:
        """Give the directory back; what is not acknowledged is forgotten. Fine when it is closed
        already.
        """
        self.abort_initial()
        if self._parts is not None:
            self._parts.groups.stop_receiving()
            if self._parts.newest is not None:
                self._parts.newest.close()
            self._parts.run.close()
        self._parts = None

    @property
    def _open(self) -> _Open:
        if self._parts is None:
            raise StoreError("the store is not open; call recover first")
        return self._parts

    @property
    def _merging(self) -> Merging:
        if self._open.merging is None:
            self._load_newest()
        assert self._open.merging is not None, "it is loaded"
        return self._open.merging

    @property
    def run(self) -> RunDirectory:
        """The run directory, which writes facts that concern no version."""
        return self._open.run

    @property
    def kind(self) -> DeltaKind:
        """The kind of the run's deltas."""
        return self._settings.kind

    @property
    def version(self) -> int:
        """The current version; -1 when there is none."""
        return self._open.run.book.version

    @property
    def digest(self) -> str:
        """Digest of the current version; empty when there is none."""
        return self._open.run.book.digests.get(self.version, "")

    @property
    def tokens_total(self) -> int:
        """Tokens of all deltas merged so far."""
        return self._open.run.book.tokens_total

    @property
    def manifest(self) -> Manifest:
        """The model's tensors; StoreError before version 0."""
        return self._open.run.manifest

    @property
    def records(self) -> tuple[VersionRecord, ...]:
        """The records of the kept versions, oldest first."""
        return self._open.run.kept.records

    @property
    def aside(self) -> tuple[str, ...]:
        """Keys of deltas that the rollback of this start has quarantined."""
        return tuple(self._open.run.aside)

    def known(self, key: DeltaKey) -> Outcome | None:
        """Return the outcome of a delta, or None when it was never acknowledged."""
        return self._open.run.book.known(key)

    # --- version 0 ---

    def begin_initial(self, manifest: Manifest) -> None:
        """Start to receive version 0; chunks received before are dropped.

        ManifestError: its tensors do not suit the run's rule of adapters.
        """
        if self.version >= 0:
            raise StoreError(
                f"the run is at version {self.version}; its weights are never replaced"
            )
        rule = self._settings.adapters
        # A mean is one of any tensors: a head alone, or a script's own adapters by their own names.
        if self._settings.channel is not None and manifest.values > manifest.weights:
            text = "the model has buffers, which no channel adds up: set exchange.buffers = none"
            raise ManifestError(text)
        if rule is not None and (rule.merges_products or has_adapters(manifest)):
            adapter_modules(manifest, rule)
        self.abort_initial()
        with disk("cannot write version 0"):
            self._initial = InitialWeights(self._files, self._open.run.checkpoints, manifest)
        if self._settings.upstream is not None:
            self._own = np.empty(manifest.values, np.float32)

    def initial_next_chunk(self) -> int:
        """Return the chunk that `write_initial` expects next."""
        return self._initial.next_chunk if self._initial else 0

    def write_initial(self, index: int, *frames: BytesLike) -> None:
        """Store chunks of version 0 from `index` on: fp32 frames, finite, in order.

        Repeats are ignored.
        """
        if self._initial is None:
            raise StoreError("version 0 was not begun; call begin_initial first")
        with disk("cannot write version 0"):
            self._initial.write(index, *frames)
        if self._settings.upstream is not None:
            for number, frame in enumerate(frames, index):
                start, stop = self._initial.manifest.chunk_range(number)
                decode_into(frame, self._own[start:stop])

    def abort_initial(self) -> None:
        """Drop what was received of version 0, if anything."""
        if self._initial is not None:
            self._initial.close()
            self._initial = None

    def finish_initial(self) -> VersionCommitted:
        """Make version 0 exist. If that fails, it must be begun again."""
        initial = self._initial
        if initial is None or initial.next_chunk != initial.manifest.chunks:
            raise StoreError(
                f"version 0 has only {self.initial_next_chunk()} chunks; send the rest"
            )
        if self._settings.upstream is not None:
            initial = self._initial = self._from_upstream(initial, self._settings.upstream)
        run = self._open.run
        if not run.book.run:
            # Recovery takes a version beside an empty ledger for a lost ledger.
            self.run.start_run(f"run-{initial.manifest.fingerprint[:8]}")
        try:
            with disk("cannot write version 0"):
                run.write_model(initial.manifest)
                run.begin_version(0)
                checkpoint = initial.publish(run.book.generation)
        finally:
            self.abort_initial()
        run.model = initial.manifest
        return self._adopt(checkpoint)

    def rejoin_upstream(self) -> None:
        """Have a cell that goes on join its run upstream again. StoreError: it cannot."""
        upstream = self._settings.upstream
        if upstream is not None and self.version >= 0:
            manifest = self.manifest
            chunks = (self._weights_chunk(self.version, at) for at in range(manifest.chunks))
            kept = [chunk.copy() for chunk in chunks if chunk is not None]
            upstream.begin(manifest, np.concatenate(kept))

    def _from_upstream(self, own: InitialWeights, upstream: Upstream) -> InitialWeights:
        """Return version 0 with the weights of the run that a cell is a client of."""
        manifest = own.manifest
        weights = upstream.begin(manifest, self._own)
        del self._own
        with disk("cannot write version 0"):
            own.close()
            made = InitialWeights(self._files, self._open.run.checkpoints, manifest)
            for index in range(manifest.chunks):
                start, stop = manifest.chunk_range(index)
                made.write(index, encode(weights[start:stop], LOSSLESS))
        return made

    # --- deltas ---

    def spool_begin(self, delta: Delta) -> Outcome | None:
        """Start or resume a delta (see `spool_next_chunk`), or return its known outcome."""
        key = delta.key
        if self.version < 0:
            raise StoreError(
                f"delta {key.text} arrived before version 0; publish the initial weights first"
            )
        self._check_files()
        known = self.known(key)
        if known is None:
            delta = recordable(delta)
            with disk(f"cannot spool delta {key.text}"):
                spool = self._open.run.spool
                spool.abort_others(key)
                spool.begin(delta)
        return known

    def _check_files(self) -> None:
        """Create spool/ again, and report what another program removed. StoreError: the run."""
        with disk("cannot look for what was removed"):
            before, self._unsaved = self._unsaved, self.unsaved()
            lines = [self._unsaved] if self._unsaved not in {"", before} else []
            if self._open.run.spool.restore():
                lines.insert(0, "spool/ was removed while the run went on, and is created again")
        if lines:
            self._report("; ".join(lines))

    def unsaved(self) -> str:
        """Describe acknowledged deltas whose files another program removed; empty: there are none.

        For any thread. StoreError: the ledger, or the whole run directory, is gone. Raises OSError.
        """
        run = self._open.run
        run.ledger.check()
        absent = run.spool.absent(list(run.book.pending))
        gone = [key for key in absent if key in run.book.pending]
        if not gone:
            return ""
        what = f"{counted(len(gone), 'acknowledged delta')}, {gone[0].text} first,"
        return (
            f"the spool files of {what} were removed and cannot be written again: they are lost,"
            " and no version can be made before the next start"
        )

    def spool_next_chunk(self, key: DeltaKey) -> int:
        """Return the chunk that `spool_write` expects next; 0 for an unknown delta."""
        return self._open.run.spool.next_chunk(key)

    def spool_write(self, key: DeltaKey, index: int, *frames: BytesLike) -> None:
        """Check and store coded chunks from `index` on, in order. Repeats are ignored."""
        with disk(f"cannot spool delta {key.text}"):
            self._open.run.spool.write(key, index, frames, self.manifest)

    def spool_reader(self, key: DeltaKey) -> FrameReader:
        """Return a reader of the frames of an acknowledged delta."""
        with disk(f"cannot read delta {key.text}"):
            return self._open.run.spool.reader(key, self.manifest)

    def spool_finish(self, key: DeltaKey) -> DeltaStored:
        """Acknowledge a complete delta: on return it is durable, in the spool or in quarantine."""
        run, spool = self._open.run, self._open.run.spool
        with disk(f"cannot spool delta {key.text}"):
            part = spool.seal(key, self.manifest)
            problem = self._merging.too_large(key.client, part.norm)
            norm = part.norm if problem is None else 0.0
            stored = StoredDelta(part.delta, part.writer.bytes, norm, part.writer.digest)
            if problem is None:
                run.record("accepted", to_fact(stored))
                spool.done(key)
                return DeltaStored(key.client, stored)
            run.record("quarantined", {**to_fact(stored), "reason": problem})
        spool.done(key)
        with suppress(OSError):  # recovery moves it if this does not
            spool.quarantine(key, run.book.held)
        return DeltaStored(key.client, stored, problem)

    # --- secure sums ---

    def open_sum(self, keys: Sequence[DeltaKey], answers: Answers) -> float:
        """Write the mean of masked deltas. Returns the rms of its values that are not zero.

        StoreError: it cannot be opened, with the reason.
        """
        from fsl_async.secure.opening import Opening  # needs an extra

        run, manifest, square, count = self._open.run, self.manifest, 0.0, 0
        readers = {key.client: run.spool.reader(key, manifest) for key in keys}

        def means() -> Iterator[bytes]:
            nonlocal square, count
            opening = Opening(answers, run.book.run)
            for index, values in enumerate(run.settings.kind.parts(manifest)):
                frames = {name: reader.frame(index) for name, reader in readers.items()}
                mean = opening.mean(frames, index, values)
                square += float(np.dot(mean, mean))
                count += int(np.count_nonzero(mean))
                yield encode(mean, LOSSLESS)

        with disk("cannot open the sum"):
            try:
                run.spool.write_sum(answers.roster.round, means())
            except (ValueError, CodecError) as error:
                raise StoreError(f"the sum cannot be opened: {error}") from error
        return math.sqrt(square / max(1, count))

    # --- the outer step ---

    def commit(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition = AT_START,
        *,
        reused: Sequence[MergedDelta] = (),
    ) -> VersionCommitted:
        """Make the next version of exactly `merged`; see `Merging.commit`.

        StoreError: the current version is as before, and the deltas are pending.
        """
        self._open.run.ledger.check()
        return self._adopt(self._merging.commit(version, merged, scale, position, reused))

    @property
    def groups(self) -> GroupsStore:
        """Cuts, results and decisions of global rounds."""
        return self._open.groups

    def adopt_global(
        self, decision: Decision, *, counted: bool, keeps_momentum: bool = True
    ) -> VersionCommitted:
        """Make the next version of global weights; see `GroupsStore.make_version`.

        keeps_momentum: runs keep it; false measures the alternative (docs/BENCHMARKS.md).
        """
        if self.version < 0:
            self.run.start_run("run")
        groups = self._open.groups
        if self._open.merging is not None:
            self._merging.restore(self.version)
        checkpoint = groups.make_version(
            decision, self._open.newest, counted=counted, keeps_momentum=keeps_momentum
        )
        made = self._adopt(checkpoint)
        groups.adopted()
        return made

    def _adopt(self, checkpoint: Checkpoint) -> VersionCommitted:
        """Take over a new version: apply it, write its ledger line, and remove unneeded files."""
        opened, record = self._open, checkpoint.record
        self._take_snapshots()
        opened.run.kept.add(checkpoint)
        opened.run.confirm_version(record)
        if opened.newest is None:
            try:
                self._load_newest()
            except StoreError as error:  # the version is there all the same
                self._report(f"version {record.version} cannot be loaded yet: {error}")
            opened = self._open
        oldest = self._forget_old()
        alike, opposite = opened.run.spool.sketches.compare(one.key for one in record.merged)
        # The version exists, so nothing from here on may make the commit fail.
        notice = ""
        leaving: list[Path] = []
        try:
            # In this order: until its line is written, only the version's folder says what it
            # merged.
            opened.run.write_outstanding()
            leaving = opened.run.retire(oldest)
        except OSError as error:
            notice = f"cleanup after version {record.version} failed and is tried again: {error}"
        if opened.newest is not None:
            opened.newest.snapshots.remove_later(leaving)
            opened.newest.begin_snapshot(checkpoint)
            if self._settings.kind.is_full:  # no coded change leads to it
                opened.newest.finish_snapshot()
        by_rounds = self._settings.product_rule is not None or self._settings.kind.is_scalars
        return VersionCommitted(
            record.version,
            record.digest,
            record.update_bytes,
            cosine=record.cosine,
            product_norms={
                one.key.client: one.product_norm for one in record.merged if one.product_norm
            },
            made_of=record.made_of,
            global_base=self._open.groups.update_base if record.made_of == "global" else "",
            alike=dict(alike),
            opposite=opposite,
            late=record.late if by_rounds else (),
            notice=notice,
        )

    def _forget_old(self) -> int:
        """Forget the versions that nothing needs any more; return the oldest that is kept."""
        kept, book = self._open.run.kept, self._open.run.book
        oldest = oldest_needed(kept.all, self._settings.keep_versions) if kept.all else 0
        if self._serving_from is not None:
            oldest = min(oldest, self._serving_from)
        kept.drop_below(oldest)
        # What no whole version contains is needed to make it again.
        book.since = oldest
        return oldest

    def _take_snapshots(self) -> None:
        """Take over versions that have become whole since."""
        opened = self._open
        for made in opened.newest.take_snapshots() if opened.newest is not None else ():
            opened.run.kept.add(made)

    def finish_snapshot(self) -> None:
        """Wait until the newest version is whole, so that its folder has its weights.

        If that fails, the versions before and the spool are kept, and a start makes it again.
        """
        newest = self._open.newest
        if newest is not None:
            newest.finish_snapshot()
            self._take_snapshots()

    # --- what clients fetch ---

    def keep_from(self, version: int | None) -> None:
        """Keep `version` and all later ones, beyond keep_versions, while clients fetch them.

        None: keep only keep_versions.
        """
        self._serving_from = version

    def has_update(self, version: int) -> bool:
        """Whether the coded change from `version` - 1 to `version` is kept."""
        return self._open.run.kept.has_update(version)

    def read_update(self, version: int, index: int) -> bytes | None:
        """Return the coded chunk `index` of the change to `version`; None when it is not kept.

        Raises IndexError.
        """
        return self._open.run.kept.read_update(version, index, self.manifest)

    def update_in_memory(self, version: int, index: int) -> bytes | None:
        """Return what `read_update` does if that is in memory, else None. For any thread."""
        parts = self._parts  # read once: the store's thread may close it
        return None if parts is None else parts.run.kept.update_in_memory(version, index)

    def read_seeds(self, since: int, version: int) -> bytes | None:
        """Return a frame of all steps from version `since` to `version`; None if not all are known
        or they are more than a frame holds.
        """
        steps = self._open.run.book.seeds_between(since, version)
        return None if steps is None else frame_of(steps)

    def read_full(self, version: int, index: int) -> bytes | None:
        """Return chunk `index` of a version's weights as an fp32 frame; None when it is not kept.

        Raises IndexError, CheckpointDamaged.
        """
        self._served_full = max(self._served_full, version)
        values = self._weights_chunk(version, index)
        return None if values is None else encode(values, LOSSLESS)

    def _weights_chunk(self, version: int, index: int) -> NDArray[np.float32] | None:
        """Return a chunk of a version's weights, valid until the next version is made."""
        opened = self._open
        if opened.newest is not None and opened.newest.vectors.version == version:
            return opened.newest.vectors.weights_chunk(index)
        return opened.run.kept.read_weights(version, index, self.manifest)

    def verify(self, version: int) -> bool:
        """Return whether every byte of a kept version is as written.

        The newest one is written again where it is not. CheckpointDamaged: it cannot be.
        """
        opened, newest = self._open, self._open.newest
        intact = opened.run.kept.verify(version, self.manifest)
        if newest is None or version != self.version:
            return intact
        if not newest.is_intact:
            self._report(f"version {version} was damaged in memory; it is read again")
            with disk(f"cannot read version {version}"):
                newest.recover()
            intact = False
        newest.begin_snapshot(opened.run.kept.get(version))
        return intact
