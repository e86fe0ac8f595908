"""FedIT: the weighted mean of both factors."""

from __future__ import annotations

from fsl_async.store.adapters.base import AdapterRule


class FedIT(AdapterRule):
    """A = sum w_k A_k, B = sum w_k B_k. The product is not the mean of the products."""

    name = "fedit"
    summary = "mean of A and mean of B"
    source = "Zhang et al. 2023, arXiv:2305.05644"
    is_linear = True
