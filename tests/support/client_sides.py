"""Both sides of a client in one process, without a network."""

import torch
from torch import nn

from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import Orders
from fsl_async.learn.client.training import Training
from fsl_async.roles.sync.events import Attached


class Weights(nn.Module):
    """One vector of weights, all equal at first."""

    def __init__(self, values=5, start=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((values,), start))

    def numbers(self):
        """Return a copy of the weights."""
        return self.w.detach().numpy().copy()

    def add(self, amount):
        """Train: move the weights by `amount`."""
        with torch.no_grad():
            self.w += torch.as_tensor(amount)


class Sides:
    """The training side and the exchange side of a client.

    publishes: its own weights become version 0 as soon as a model is attached. take: called with
    each event; by default they are appended to `events`.
    """

    def __init__(self, coder=None, *, publishes=False, take=None):
        self.events = []
        self.publishes = publishes
        self._take = take or self.events.append
        self.orders = Orders()
        self.exchange = Exchange(self.orders, coder, self._on_event)
        self.training = Training(self.orders, self.exchange)

    def _on_event(self, event):
        self._take(event)
        if self.publishes and isinstance(event, Attached):
            self.exchange.request_rebase(0, self.exchange.adopt_initial())

    def step(self, tokens=1, metrics=None):
        """Do a training step with this count and these metrics; returns whether training goes
        on.
        """
        self.training.meter.count(tokens, metrics)
        return self.training.attend() if self.orders.attention else True
