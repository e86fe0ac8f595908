"""RoLoRA: the factors are trained and averaged in turns."""

from __future__ import annotations

from fsl_async.store.adapters.base import AdapterRule


class RoLoRA(AdapterRule):
    """From even versions sites train B, from odd ones A. Exact: the other factor is common."""

    name = "rolora"
    summary = "rounds train B and A in turns; mean of what was trained"
    source = "Chen et al. 2025, arXiv:2502.01755"
    by_rounds = True
    is_linear = True

    def trains_a(self, version: int) -> bool:
        """From odd versions."""
        return version % 2 == 1

    def trains_b(self, version: int) -> bool:
        """From even versions."""
        return version % 2 == 0
