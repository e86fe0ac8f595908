"""An outer optimizer: FedYogi (Reddi et al. 2021, arXiv:2003.00295, algorithm 2).

    fsl-node --role ps --set outer.optimizer=examples/rules/fedyogi.py:FedYogi
        --set outer.learning_rate=0.01 --set outer.momentum=0.9

`outer.learning_rate` is the server's rate, `outer.momentum` is beta_1.
"""

import numpy as np

from fsl_async.store.rules import OuterOptimizer


class FedYogi(OuterOptimizer):
    """Adaptive steps: mean and variance of the average, for each weight."""

    vectors = ("first", "second")
    beta_2, tau = 0.99, 1e-3

    def step(self, average, state, numbers):
        """See `OuterOptimizer.step`. The paper's Delta is -average; v begins at tau^2."""
        first, second, square = state["first"], state["second"], np.square(average)
        first += np.float32(1.0 - numbers.momentum) * (average - first)
        beyond = np.sign(second + np.float32(self.tau**2) - square)
        second -= np.float32(1.0 - self.beta_2) * square * beyond
        size = np.sqrt(second + np.float32(self.tau**2)) + np.float32(self.tau)
        return np.float32(-numbers.learning_rate) * first / size
