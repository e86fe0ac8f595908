"""A client tells how its training goes, also where versions are far apart."""

from fsl_async.nodes.client.training_watch import FIRST_LINE_S, LINE_EVERY_S, ProgressLines


class Clock:
    """A loop's timers."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def call_later(self, wait_s, call):
        """Call later."""
        timer = Timer(self.now + wait_s, call)
        self.timers.append(timer)
        return timer

    def run_until(self, end):
        """Call what is due until `end`."""
        while due := [one for one in self.timers if one.at <= end and not one.cancelled]:
            first = min(due, key=lambda one: one.at)
            self.timers.remove(first)
            self.now = first.at
            first.call()
        self.now = end


class Timer:
    """A call to come."""

    def __init__(self, at, call):
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self):
        """Do not call."""
        self.cancelled = True


def test_progress_is_told_soon_and_then_once_a_minute():
    """Not before the first step, and not again after a line about a version."""
    clock, said, report = Clock(), [], {"step": 0.0}
    lines = ProgressLines(clock, lambda: report, lambda one: f"step {one['step']:g}", said.append)
    clock.run_until(2 * FIRST_LINE_S)
    assert said == []
    report["step"] = 5.0
    clock.run_until(3 * FIRST_LINE_S)
    assert said == ["training: step 5"]
    report["step"] = 9.0
    clock.run_until(3 * FIRST_LINE_S + LINE_EVERY_S - 1)
    lines.printed(9.0)
    clock.run_until(3 * FIRST_LINE_S + LINE_EVERY_S + 30)
    assert said == ["training: step 5"]
    report["step"] = 12.0
    clock.run_until(3 * FIRST_LINE_S + 2 * LINE_EVERY_S)
    assert said[1:] == ["training: step 12"]
    lines.close()
    report["step"] = 99.0
    clock.run_until(3 * FIRST_LINE_S + 9 * LINE_EVERY_S)
    assert len(said) == 2
