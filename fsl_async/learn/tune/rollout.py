"""The built-in task of a client that rolls out: it draws and rates answers, and trains nothing."""

import torch

from fsl_async.learn.client.fed import Fed
from fsl_async.learn.tune.site import RewardSite


def roll_out(fed: Fed) -> None:
    """Send answers to the site's prompts, rated, until the run ends."""
    if threads := fed.settings.train.threads:
        torch.set_num_threads(threads)
    site = RewardSite(fed, fed.settings.tune)
    fed.log(f"draws answers to {site.summary}")
    site.roll_out()
