"""FFA-LoRA: A stays as it was drawn, and B is averaged."""

from __future__ import annotations

from fsl_async.store.adapters.base import AdapterRule


class FFA(AdapterRule):
    """B = sum w_k B_k; A is that of the run's seed. Exact: the product is linear in B."""

    name = "ffa"
    summary = "A is drawn once and never sent; mean of B"
    source = "Sun et al. 2024, arXiv:2403.12313"
    exchanges_a = False
    is_linear = True

    def trains_a(self, version: int) -> bool:
        """Never."""
        del version
        return False
