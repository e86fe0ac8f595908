"""Every error this package raises.

    CodecError
    ├── FrameError       the bytes are wrong: damaged, cut short, of another version, or hostile
    ├── LimitError       the frame may be valid, but is larger than the caller allows
    └── CodecUsageError  misuse by the caller: wrong dtype, output too small, impossible settings

A caller that reads frames from the network treats the first two as the peer's fault and the third
as its own.
"""


class CodecError(Exception):
    """Base of all errors of this package."""


class FrameError(CodecError):
    """The frame's bytes do not follow the format."""


class LimitError(CodecError):
    """The frame announces more values than the caller's output or limits allow."""


class CodecUsageError(CodecError):
    """The calling code passed an argument that this package does not accept."""
