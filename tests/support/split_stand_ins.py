"""Stand-ins for the training thread of split learning: a run without a network."""

import threading
import time

from fsl_async.learn.client.meter import Meter


class RunAlone:
    """A run whose events go nowhere, until `post_split` is replaced.

    It does not end until `running` is False.
    """

    def __init__(self, *, running=True, meter=None):
        self.running, self.version = running, 0
        self.meter = meter or Meter()
        self.changed, self.now = threading.Condition(), time.monotonic

    def begin_batch(self):
        """Take no time."""

    def post_split(self, event):
        """Discard the event."""
