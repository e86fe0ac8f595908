"""How far a run is towards its planned end. Pure."""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.sync.ps_state import ParameterServerRules


@mutable
class RunProgress:
    """Progress in [0, 1] by the limit that will be reached first: tokens, rounds or seconds."""

    rules: ParameterServerRules
    tokens: int = 0
    """Merged so far."""
    served_s: float = 0.0
    """Seconds for which earlier processes served the run."""
    started_at: float = 0.0
    """When this process began to, in seconds of the caller's clock."""

    def recovered(self, tokens: int, served_s: float, now: float) -> None:
        """Continue from the state on disk."""
        self.tokens, self.served_s, self.started_at = tokens, served_s, now

    def with_version(self, version: int, tokens: int, now: float) -> float | None:
        """Return the progress once `version` is made of `tokens` more; None without any limit."""
        rules, parts = self.rules, []
        if rules.limit_rounds:
            parts.append(version / rules.limit_rounds)
        if rules.limit_tokens:
            parts.append((self.tokens + tokens) / rules.limit_tokens)
        if rules.limit_s:
            parts.append((self.served_s + now - self.started_at) / rules.limit_s)
        return min(1.0, max(parts)) if parts else None
