"""Reads a payload from its front."""

from .errors import FrameError
from .formats import ByteArray


class Reader:
    """Takes bytes from the front of a payload; FrameError past its end."""

    def __init__(self, data: ByteArray) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> ByteArray:
        """The next `count` bytes, without a copy."""
        start, self._position = self._position, self._position + count
        if self._position > self._data.size:
            raise FrameError("payload ends too early")
        return self._data[start : self._position]

    def number(self, size: int) -> int:
        """The next `size` bytes as an integer, lowest byte first."""
        return int.from_bytes(self.take(size).tobytes(), "little")

    def byte(self) -> int:
        """The next byte."""
        return int(self.take(1)[0])

    def finish(self) -> None:
        """FrameError if bytes are left."""
        if self._position != self._data.size:
            raise FrameError(f"{self._data.size - self._position} bytes too many in a payload")
