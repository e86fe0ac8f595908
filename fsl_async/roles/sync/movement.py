"""Tells when a client trains steps that change no exchanged weight. Pure.

One such snapshot may have a good cause (a loss scale that is being found, a rate that begins at 0).
`ALARM_AFTER` of them in a row are reported, once until weights change again: by the client, and by
the parameter server, which looks at the norms of deltas (`fsl_async.observe.rounds`).
"""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.machine import Note

ALARM_AFTER = 2

CAUSES = (
    "its optimizer may hold other tensors than the attached model (make it after the model's last"
    " change), a GradScaler may skip every step (look at scaler.get_scale()), gradients may be"
    " dropped, or the learning rate is 0"
)


@mutable
class Movement:
    """Snapshots in a row whose steps changed no exchanged weight."""

    still: int = 0
    steps: int = 0
    """Of those snapshots."""

    def saw(self, steps: int, *, moved: bool) -> list[Note]:
        """Count a snapshot of so many steps, at least one."""
        was_told = self.still >= ALARM_AFTER
        if moved:
            self.still = self.steps = 0
            return [Note("training changes the exchanged weights again")] if was_told else []
        self.still += 1
        self.steps += steps
        if self.still != ALARM_AFTER:
            return []
        text = (
            f"{self.steps} steps in {self.still} rounds changed no exchanged weight, and such"
            f" deltas do not count: {CAUSES}"
        )
        return [Note(text, "warning")]
