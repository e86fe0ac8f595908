"""A site's own code that a run names: models for split learning. Pure.

A parameter server must not choose which code runs at a client. Its configuration has `own` where a
run needs the user's code: a client runs the copy that its own command line names, or none.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.errors import TaskError


@frozen
class SiteCode:
    """Of this site, each as file.py:function: a model and an auxiliary model."""

    model: str | None = None
    auxiliary: str | None = None

    def settings(self) -> dict[tuple[str, str], str]:
        """In place of which settings, by table and key."""
        places = {("model", "family"): self.model, ("split", "auxiliary"): self.auxiliary}
        return {place: code for place, code in places.items() if code}

    def check(self, config: Config) -> None:
        """Raise TaskError where the run wants code that this site did not give."""
        wanted = {
            "--model": ("model.family", config.model.family, self.model),
            "--auxiliary": ("split.auxiliary", config.split.auxiliary, self.auxiliary),
        }
        for option, (key, value, given) in wanted.items():
            if is_own(value) and not given:
                raise TaskError(
                    f"this run has a {key} of its own: give this client its copy with {option} "
                    "FILE.py:FUNCTION"
                )


NOTHING_OWN = SiteCode()
