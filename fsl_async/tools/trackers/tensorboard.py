"""Points as TensorBoard's event files, in DIR/<run>. Needs `tensorboard` (extra of that name).

A restarted reader adds a file to the folder and goes on after the last step of each series in the
files that are there. Its own writer and protocol buffers are used: no torch is imported.
"""

import shlex
from pathlib import Path
from typing import Any

from fsl_async.tools.trackers.catalog import Point

EVENTS = "events.out.tfevents.*"


class TensorBoard:
    """Writes to `folder`, which is made. Raises ImportError or OSError."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._written = _last_steps(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.where = f"tensorboard --logdir {shlex.quote(str(folder.parent))}"
        self._folder = folder
        self._file: Any = None

    def written(self) -> dict[str, int]:
        """The last step of each series in the files that were there."""
        return self._written

    def log(self, point: Point) -> None:
        """Add the point, and flush."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in point.values.items()
        ]
        summary = self._summary(value=values)
        if self._file is None:  # now: a reader with nothing to write leaves no file
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._file = EventFileWriter(str(self._folder))
        self._file.add_event(self._event(wall_time=point.t, step=point.step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _last_steps(folder: Path) -> dict[str, int]:
    """The last step of each series; a file that a crash tore counts up to there."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    found: dict[str, int] = {}
    for path in sorted(folder.glob(EVENTS)):
        for raw in RawEventFileLoader(str(path)).Load():
            event = event_pb2.Event.FromString(raw)
            for value in event.summary.value:
                found[value.tag] = max(found.get(value.tag, -1), event.step)
    return found
