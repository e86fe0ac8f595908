"""Errors of the learning rooms.

    LearnError
    ├── ManifestError          a list of tensors makes no sense (a peer's, or our own)
    ├── FrameRefused           a coded frame is not what its place in the stream needs: the peer's fault
    ├── LearnerError           a client's weights cannot do what is asked of them
    └── StoreError             the run directory cannot be read or written, or was used in the wrong order
        ├── NoThread           the system gives no further thread
        ├── LedgerDamaged      a line in the middle of the ledger does not match its checksum
        └── CheckpointDamaged  a file of a version does not match its digest

Every message is one line: what happened, to whom, and what to do.
"""

from __future__ import annotations


class LearnError(Exception):
    """Base of all errors of the learning rooms."""


class ManifestError(LearnError):
    """A list of tensors makes no sense; the message names the first tensor at fault."""


class FrameRefused(LearnError):  # noqa: N818 - named after what happened, as the contract between the rooms has it
    """A coded frame is damaged, of the wrong length or out of order. The sender is at fault, not this node."""


class LearnerError(LearnError):
    """A request that cannot be met, in one line. Model and reference are untouched; a fetch may be begun again."""


class StoreError(LearnError):
    """The run directory could not be read or written, or the store was used in the wrong order."""


class NoThread(StoreError):  # noqa: N818
    """The system gives no further thread; nothing on the disk is at fault."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no thread can be started ({reason}); raise the limit of processes, or set codec.threads to 1, and start again"
        )


class LedgerDamaged(StoreError):  # noqa: N818
    """Line `line` (counted from 1) of the ledger does not match its checksum, and no crash could have torn it so."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(
            f"{path} line {line} is damaged, and not by a crash; "
            f"put the ledger back from a backup, or start again in a new run directory from a checkpoint"
        )
        self.path = path
        self.line = line


class CheckpointDamaged(StoreError):  # noqa: N818
    """`file` of version `version` is missing or altered; `previous_version` is the newest good one below, or None."""

    def __init__(self, version: int, file: str, previous_version: int | None, reason: str) -> None:
        if previous_version is None:
            advice = "no older version is intact; put the file back from a backup"
        else:
            advice = f"put it back from a backup, or fall back to version {previous_version} (from_version={previous_version})"
        super().__init__(f"version {version} is damaged: {file} {reason}; {advice}")
        self.version = version
        self.file = file
        self.previous_version = previous_version
