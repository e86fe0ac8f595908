"""A site's own code for split learning: models. Pure.

A parameter server must not choose which code of a client's machine runs. Its configuration has
`own` where a run needs the user's code: a client runs the file of its own command line, or none.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.errors import TaskError


@frozen
class SiteCode:
    """A site's model and auxiliary model, each as file.py:function."""

    model: str | None = None
    auxiliary: str | None = None

    def settings(self) -> dict[tuple[str, str], str]:
        """Return the settings that this code replaces, by table and key."""
        replaced = {("model", "family"): self.model, ("split", "auxiliary"): self.auxiliary}
        return {key: code for key, code in replaced.items() if code}

    def check(self, config: Config) -> None:
        """Raise TaskError where the run needs code that this site did not give."""
        needed = {
            "--model": ("model.family", config.model.family, self.model),
            "--auxiliary": ("split.auxiliary", config.split.auxiliary, self.auxiliary),
        }
        for option, (key, value, given) in needed.items():
            if is_own(value) and not given:
                raise TaskError(
                    f"this run has a {key} of its own: give this client its copy with {option}"
                    " FILE.py:FUNCTION"
                )


NOTHING_OWN = SiteCode()
