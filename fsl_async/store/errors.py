"""Errors of the store and of weights.

    LearnError
    ├── ManifestError          a list of tensors makes no sense (a peer's, or our own)
    ├── FrameRefused           a coded frame does not fit its place in the stream: the peer's fault
    ├── LearnerError           a client's weights cannot do what is asked of them
    └── StoreError             the run directory cannot be read or written, or calls were in the
        │                      wrong order
        ├── NoWorkerThread           the system gives no further thread
        └── Damaged            what is on the disk was altered: trying again does not help
            ├── LedgerDamaged      a line in the middle of the ledger does not match its checksum
            ├── LedgerLost         there are versions, and no ledger, or an empty one
            ├── DeltaDamaged       a spooled delta cannot be decoded any more
            └── CheckpointDamaged  a file of a version does not match its digest
    Damage                     one damaged file, until a repair was tried; never leaves the store

Every message is one line: what happened, to which file or peer, and what to do.
"""

from __future__ import annotations


class LearnError(Exception):
    """Base of all errors of the store and of weights."""


class ManifestError(LearnError):
    """A list of tensors makes no sense; the message names the first tensor at fault."""


class FrameRefused(LearnError):  # noqa: N818 - named after what happened, as the contract between the rooms has it
    """A coded frame is damaged, of the wrong length or out of order. The sender is at fault, not
    this node.
    """


class LearnerError(LearnError):
    """A request that cannot be met, in one line. Model and reference are untouched; a fetch may be
    begun again.
    """


class StoreError(LearnError):
    """The run directory could not be read or written, or the store was used in the wrong order."""


class NoWorkerThread(StoreError):  # noqa: N818
    """The system gives no further thread; nothing on the disk is at fault."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no thread can be started ({reason}); raise the limit of processes, or set "
            "codec.threads to 1, and start again"
        )


class Damaged(StoreError):  # noqa: N818
    """What is on the disk is not what was written. Trying again does not help; the message says
    what does.
    """


class LedgerDamaged(Damaged):
    """Line `line` (counted from 1) of the ledger does not match its checksum, and no crash could
    have torn it so.
    """

    def __init__(self, path: str, line: int) -> None:
        super().__init__(
            f"{path} line {line} is damaged, and not by a crash; "
            "put the ledger back from a backup, or move it away and start again: that says how to "
            "go on without it"
        )
        self.path = path
        self.line = line


class LedgerLost(Damaged):
    """The ledger at `path` is missing or empty, and there are versions."""

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
    """The spool file of an acknowledged delta was altered; the next start moves it to quarantine
    and goes on without it.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"delta {key} cannot be read back from the spool: {reason};"
            " start again: the delta is then moved to quarantine, and the run goes on without it"
        )


class Damage(Exception):  # noqa: N818 - becomes CheckpointDamaged where it cannot be repaired
    """`file` of a version is missing or altered; `reason` completes the sentence."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file = file
        self.reason = reason


class CheckpointDamaged(Damaged):
    """`file` of version `version` is missing or altered; `previous_version` is the newest good one
    below, or None.
    """

    def __init__(self, version: int, file: str, previous_version: int | None, reason: str) -> None:
        if previous_version is None:
            advice = "no older version is intact; put the file back from a backup"
        else:
            advice = (
                f"put it back from a backup, or start again with --from-version {previous_version}"
            )
        super().__init__(f"version {version} is damaged: {file} {reason}; {advice}")
        self.version = version
        self.file = file
        self.previous_version = previous_version
