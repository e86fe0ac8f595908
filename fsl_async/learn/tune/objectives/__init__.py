"""What fine-tuning minimizes, an objective a file.

    lm.py         the next token
    classify.py   labels
    dpo.py        preferences, held back by the base
    simpo.py      preferences, without a base
    orpo.py       preferences and likelihood, without a base
    kto.py        answers found good or bad, one by one
    reward.py     a head that gives an answer a number, from preferences
    grpo.py       rewards of the model's own answers
    base.py       what they share

To add one: a class here, its name in `Objective` (`fsl_async.config.settings_tuning`), the shape of
its records (`fsl_async.learn.tune.records`).
"""

from collections.abc import Callable, Mapping

from fsl_async.config.settings_tuning import Objective, TuneConfig
from fsl_async.learn.tune.objectives.base import Tuning
from fsl_async.learn.tune.objectives.classify import Classify
from fsl_async.learn.tune.objectives.dpo import Dpo
from fsl_async.learn.tune.objectives.grpo import Grpo
from fsl_async.learn.tune.objectives.kto import Kto
from fsl_async.learn.tune.objectives.lm import Lm
from fsl_async.learn.tune.objectives.orpo import Orpo
from fsl_async.learn.tune.objectives.reward import Reward
from fsl_async.learn.tune.objectives.simpo import Simpo


def objective_of(tune: TuneConfig) -> Tuning:
    """Return the run's objective."""
    beta = tune.strength
    kinds: Mapping[Objective, Callable[[], Tuning]] = {
        "lm": Lm,
        "classify": lambda: Classify(tune.label_names),
        "dpo": lambda: Dpo(beta),
        "kto": lambda: Kto(beta),
        "simpo": lambda: Simpo(beta, tune.gamma),
        "orpo": lambda: Orpo(beta),
        "reward": Reward,
        "grpo": lambda: Grpo(tune.kl, tune.kl_limit),
    }
    return kinds[tune.objective]()
