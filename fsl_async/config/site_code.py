"""Code of a site's own that a run names: models for split learning. Pure.

A server must not choose which code of a client's machine is run. Its configuration says `own` where
a run needs code of the user's: a client runs the copies that its own command line gives, or none.
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
