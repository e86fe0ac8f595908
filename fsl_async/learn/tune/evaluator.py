"""The built-in evaluator of fine-tuning: scores deltas on this site's records, and trains nothing.

It uses the public fed API only: copy it.
"""

import torch

from fsl_async.learn.client.fed import Fed
from fsl_async.learn.tune.site import site_of


def evaluate(fed: Fed) -> None:
    """Score the deltas of each round until the run ends. All records of the site count."""
    tune, threads = fed.settings.tune, fed.settings.train.threads
    if threads:
        torch.set_num_threads(threads)
    site = site_of(fed, tune)
    fed.log(f"evaluates deltas on {site.summary}")
    fed.evaluate_deltas(lambda: site.measure(every=True)["eval_loss"])
