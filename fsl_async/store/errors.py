"""Errors of the store and of training.

    LearnError
    ├── ManifestError          a list of tensors, a peer's or our own, is invalid
    ├── FrameRefused           a coded frame does not fit its place in the stream: the peer's fault
    ├── LearnerError           a client's weights do not allow the request
    └── StoreError             the run directory cannot be read or written, or calls came in the
        │                      wrong order
        ├── NoWorkerThread     the system cannot start another thread
        ├── NotFinite          a version would hold NaN or infinity
        ├── RuleFailed         the operator's own rule raised, or returned what cannot be used
        └── Damaged            data on disk was altered: trying again does not help
            ├── LedgerDamaged      a line in the middle of the ledger does not match its checksum
            ├── LedgerLost         there are versions, but the ledger is missing or empty
            ├── DeltaDamaged       a spooled delta can no longer be decoded
            └── CheckpointDamaged  a file of a version does not match its digest
    Damage                     the same for one file, until another way was tried

Every message is one line: what happened, to which object, and what to do.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from fsl_async.errors import disk_words

if TYPE_CHECKING:
    from collections.abc import Iterator


class LearnError(Exception):
    """Base class of the errors of the store and of training."""


class ManifestError(LearnError):
    """A list of tensors is invalid; the message names the first wrong tensor."""


class FrameRefused(LearnError):  # noqa: N818 - named after what happened
    """A coded frame is damaged, of the wrong length or out of order. The sender is at fault."""


class LearnerError(LearnError):
    """A request that cannot be met.

    Model and reference weights are unchanged; a fetch may be started again.
    """


class StoreError(LearnError):
    """The run directory cannot be read or written, or calls came in the wrong order."""


class NoWorkerThread(StoreError):  # noqa: N818
    """The system cannot start another thread; the data on disk is good."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no thread can be started ({reason}); raise the limit of processes, or set "
            "codec.threads to 1, and start again"
        )


class NotFinite(StoreError):  # noqa: N818
    """The next version would hold NaN or infinity; a commit adds the way out."""


class RuleFailed(StoreError):  # noqa: N818
    """The operator's own rule raised, or its result cannot be used; the deltas stay pending."""


class Damaged(StoreError):  # noqa: N818
    """Data on disk is not what was written.

    Trying again does not help; the message says what does.
    """


class LedgerDamaged(Damaged):
    """Line `line` (counted from 1) of the ledger fails its checksum, and no crash causes that."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(
            f"{path} line {line} is damaged, and not by a crash; "
            "restore the ledger from a backup, or move it away and start again: that says how to "
            "go on without it"
        )
        self.path = path
        self.line = line


class LedgerLost(Damaged):
    """The ledger at `path` is missing or empty although there are versions."""

    def __init__(self, path: str, there: str, newest_good: int | None) -> None:
        if newest_good is None:
            advice = "no version is intact; restore the run directory from a backup"
        else:
            advice = (
                f"restore it from a backup, or start again with --from-version {newest_good} to go "
                "on from that version"
                " without the deltas that were acknowledged and not merged"
            )
        super().__init__(f"{path} is missing or empty, and there {there}; {advice}")


class DeltaDamaged(Damaged):
    """The spool file of an acknowledged delta was altered or removed.

    The next start records the delta as lost and continues without it.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"delta {key} cannot be read back from the spool: {reason};"
            " start again: the delta is then on record as lost, and the run goes on without it"
        )


class Damage(Exception):  # noqa: N818 - becomes CheckpointDamaged where nothing leads to the version
    """`file` of a version is missing or altered; `reason` completes the sentence."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file = file
        self.reason = reason


class CheckpointDamaged(Damaged):
    """`file` of version `version` is missing or altered.

    previous_version: the newest intact version below it, or None.
    """

    def __init__(self, version: int, file: str, previous_version: int | None, reason: str) -> None:
        if previous_version is None:
            advice = "no older version is intact; restore the file from a backup"
        else:
            advice = (
                f"restore it from a backup, or start again with --from-version {previous_version}"
            )
        super().__init__(f"version {version} is damaged: {file} {reason}; {advice}")
        self.version = version
        self.file = file
        self.previous_version = previous_version


@contextmanager
def disk(doing: str) -> Iterator[None]:
    """Turn OSError into a StoreError of one line that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{doing}: {disk_words(error)}") from error
