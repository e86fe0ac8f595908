"""A site of fine-tuning: its model, its data, and what it trains and measures on.

Most objectives learn from records (`RecordSite`). One learns from a reward function of the site's
own, which rates the model's answers to its prompts (`RewardSite`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import TaskError
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.pretrain import HeldOut, autocast
from fsl_async.learn.tune.answers import (
    Prompts,
    Rater,
    batch_of_groups,
    load_reward,
    rounds_of_places,
    uniforms_of,
)
from fsl_async.learn.tune.base import Base, load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.objectives.grpo import AnswerBatch
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import TokenBatch, Tokenized, tokenize
from fsl_async.roles.sync.delta import BALANCE
from fsl_async.roles.sync.messages import Disputed, Rollout
from fsl_async.roles.sync.rollouts import MOST_AGE

EVALUATED_SAMPLES = 256
"""Held-out samples on which versions are measured during training."""


class Site(ABC):
    """The site's model, with the run's adapters and weights, and its records.

    summary: a line about the records. held_out_count: samples that are never trained on. shares: of
    labels, as metrics. Raises ConfigError and DataError, each in one line.
    """

    summary: str
    held_out_count: int

    def __init__(self, fed: Fed, tune: TuneConfig) -> None:
        self._fed, self.tune = fed, tune
        self.objective = objective_of(tune)
        self.shares: dict[str, float] = {}
        # Records of a wrong kind are an error before the model is loaded.
        data = fed.config["data"]
        records = Records(
            data["path"], tune.objective, tune.label_names, columns=data.get("columns", "")
        )
        base = load_base(
            tune.base,
            tune.objective,
            labels=tune.label_names,
            seed=fed.seed,
            device=fed.device,
            bf16=fed.device.type == "cuda" and not fed.is_zeroth,
        )
        self._read(records, base)
        self.model = fed.lora(base.model, heads=base.drawn)
        share = fed.settings.train.evaluate_share if self.held_out_count else 0.0
        self.held_out = HeldOut(fed, lambda: self.measure(EVALUATED_SAMPLES), share)

    @abstractmethod
    def _read(self, records: Records, base: Base) -> None:
        """Read the records, and divide them."""

    @abstractmethod
    def batches(self) -> Iterator[TokenBatch]:
        """Batches of this site until the run ends."""

    @abstractmethod
    def measure(self, most: int | None = None, *, every: bool = False) -> dict[str, float]:
        """Metrics of the model as it is, on so many held-out samples. every: on all of the site."""


def site_of(fed: Fed, tune: TuneConfig) -> Site:
    """Return the site of a client."""
    return (RewardSite if tune.objective == "grpo" else RecordSite)(fed, tune)


class RecordSite(Site):
    """A site that learns from records."""

    def _read(self, records: Records, base: Base) -> None:
        fed, tune = self._fed, self.tune
        self.data = tokenized(records, base, tune)
        self.summary = self.data.summary
        self.mine, self.held = self.data.split(fed.settings.data.holdout)
        self.held_out_count = 0 if self.held is None else len(self.held)
        self._balances = False
        if tune.objective == "classify":
            counts = self.mine.label_counts(len(tune.label_names))
            self._balances = tune.balance and not tune.is_private
            # An evaluator looks itself at what a site does; weights of almost nothing mislead it.
            if self._balances and not fed.settings.guard.evaluator:
                balance = self.mine.balance(len(tune.label_names))
                fed.add_facts(lambda: {BALANCE: balance})
            self.shares = {
                f"share_{name}": count / len(self.mine)
                for name, count in zip(tune.label_names, counts, strict=True)
            }

    def batches(self) -> Iterator[TokenBatch]:
        """Batches of this site until the run ends."""
        fed = self._fed
        # A client that comes back does not begin with the same samples again.
        start, size = max(fed.version, 0) * self.tune.steps, fed.settings.train.batch
        drawn = self.mine.shuffled(
            size, seed=fed.seed, name=fed.client_name, start=start, balanced=self._balances
        )
        while fed.running:
            yield next(drawn)

    def measure(self, most: int | None = None, *, every: bool = False) -> dict[str, float]:
        """See `Site.measure`."""
        held = self.data if every else self.held
        assert held is not None
        if most is not None and len(held) > most:
            held = held.select([place * len(held) // most for place in range(most)])
        with autocast(self._fed.device):
            found = self.objective.evaluate(self.model, held)
        return {name: value for name, value in found.items() if "share" not in name}


class RewardSite(Site):
    """A site that learns from rewards of the model's answers to its prompts."""

    def _read(self, records: Records, base: Base) -> None:
        fed, tune = self._fed, self.tune
        if fed.ranks > 1:
            raise TaskError("tune.objective = grpo draws answers in one process: leave out --ranks")
        reward = load_reward(fed.reward)
        self.data = Prompts(records, base.tokenizer, context_of(base, tune) - tune.answer_tokens)
        self.summary = self.data.summary
        self.mine, self.held = self.data.split(fed.settings.data.holdout)
        self.held_out_count = len(self.held)
        self._answers = Rater(base.model, base.tokenizer, reward, tune)
        self._disputed: set[str] = set()
        """Clients whose answers are not used here."""

    def batches(self) -> Iterator[TokenBatch]:
        """Answers of the model as it is, rated, until the run ends.

        Where other clients draw answers, every other batch is theirs.
        """
        fed, drawn = self._fed, self._drawn()
        while fed.running:
            if (received := self._received()) is not None:
                yield received
            if not fed.running:
                return
            places, stream = next(drawn)
            with autocast(fed.device):
                made = self._answers.batch(self.data.at(places), uniforms_of(fed.seed, stream))
            yield made

    def _drawn(self) -> Iterator[tuple[list[int], str]]:
        """Yield the prompts of each step, from the version that is here on (`rounds_of_places`)."""
        fed = self._fed
        return rounds_of_places(
            self.mine,
            fed.settings.train.batch,
            seed=fed.seed,
            name=fed.client_name,
            steps=self.tune.steps,
            version=lambda: fed.version,
        )

    def _received(self) -> AnswerBatch | None:
        """Return a batch of answers that other clients have drawn; None: there are too few."""
        fed, size = self._fed, self._fed.settings.train.batch

        def is_ripe(one: Rollout) -> bool:
            return one.version >= fed.version - MOST_AGE and one.site not in self._disputed

        found = fed.take_rollouts(is_ripe, size)
        groups = [(one.site, self._answers.group_of(one)) for one in found]
        for site in {site for site, group in groups if group is None} - self._disputed:
            self._disputed.add(site)
            fed.log(f"the rewards of {site} are others here: its answers are not used")
            fed.say(Disputed(site))
        good = [group for site, group in groups if group and site not in self._disputed]
        return batch_of_groups(good) if len(good) == size else None

    def roll_out(self) -> None:
        """Draw answers to the prompts and send them until the run ends, enough for each version."""
        fed, tune = self._fed, self.tune
        most = tune.steps * fed.settings.sync.clients
        while fed.running:
            version = fed.follow()
            drawn = self._drawn()
            for _ in range(most):
                places, stream = next(drawn)
                with autocast(fed.device):
                    sent = self._answers.groups(
                        self.data.at(places), uniforms_of(fed.seed, stream), version
                    )
                for group in sent:
                    fed.say(group)
                if fed.follow() != version or not fed.running:
                    break
            while fed.running and fed.follow() == version:
                fed.wait_for_version()

    def measure(self, most: int | None = None, *, every: bool = False) -> dict[str, float]:
        """Return the mean reward of the likeliest answers, as eval_reward.

        eval_loss is exp(-eval_reward): it is above 0, and one tenth less where the reward is .1
        more, whatever rewards are.
        """
        held = range(len(self.data)) if every else self.held
        if most is not None and len(held) > most:
            held = held[:: math.ceil(len(held) / most)]
        with autocast(self._fed.device):
            found = self._answers.greedy_reward(self.data.at(held))
        return {"eval_loss": math.exp(-found), "eval_reward": found}


def context_of(base: Base, tune: TuneConfig) -> int:
    """Return the most tokens of a sequence."""
    return min(tune.context, base.context) if base.context else tune.context


def tokenized(records: Records, base: Base, tune: TuneConfig) -> Tokenized:
    """Tokenize a site's records as its run does. Raises DataError in one line."""
    return tokenize(
        records,
        base.tokenizer,
        tune.objective,
        context=context_of(base, tune),
        trained_on=tune.trained_on,
        labels=tune.label_names,
        one_each=tune.is_private,
    )
