"""An aggregation rule: clients weigh by a metric that they send (as q-FFL, arXiv:1905.10497).

    fsl-node --role ps --set outer.aggregation=examples/rules/by_metric.py:ByLoss

A task sends the metric with its steps: fed.step(tokens=n, metrics={"loss": loss.item()}).
"""

import numpy as np

from fsl_async.store.rules import Rule


class ByLoss(Rule):
    """The mean in which a client weighs by its loss, so that bad clients catch up."""

    def combine(self, rows, clients, parts):
        """See `Rule.combine`. A client that sends no loss weighs as the mean of the others."""
        losses = [client.metrics.get("loss") for client in clients]
        known = [loss for loss in losses if loss is not None]
        usual = sum(known) / len(known) if known else 1.0
        weights = np.array([usual if loss is None else loss for loss in losses])
        shares = np.maximum(weights, 1e-6) / np.maximum(weights, 1e-6).sum()
        return np.sum(shares[:, None] * rows, axis=0).astype(np.float32)
