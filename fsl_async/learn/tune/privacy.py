"""Differentially private training of adapters at a site, record by record (DP-SGD).

Abadi et al., arXiv:1607.00133. In each step every record of the site takes part with probability q;
its gradient over all weights that train here is clipped to norm `tune.dp_clip`; to the sum of these
Gaussian noise is added, of standard deviation `noise` x `tune.dp_clip` in each weight; the result,
divided by the batch that is expected (q x records), is the gradient, for any optimizer:

    privacy = Privacy.of(fed, model, records=len(data))
    for rows in privacy.batches():                   # counted on disk before they are drawn
        if len(rows):
            privacy.accumulate(losses(model, data.select(rows)))      # one loss a record
        privacy.noise()                              # sets .grad of each weight
        optimizer.step()
        if not fed.step(tokens=privacy.batch):
            break

Report `privacy.batch` as the work of a step: how many records were really drawn is not covered by
the budget. Neither are losses and other metrics, which leave only where the site allows them.

Only factor B trains: noise on both factors of an adapter is multiplied (Sun et al.,
arXiv:2403.12313). So the run's rule is ffa or fedsvd.

What is promised. With the guarantee (epsilon, delta), for data sets that differ by one record, all
that this client sends in the run, whatever the server does with it, has probabilities that differ
by a factor of at most exp(epsilon), but for delta. See docs/SECURITY.md for what is not promised.

Accounting is by Renyi differential privacy (Mironov et al., arXiv:1908.10530), Opacus' "rdp". Its
epsilon is an upper bound by a closed sum: it holds for every q up to 1, rises with the steps, and
cannot depend on a grid. The numerical accountant (Gopi et al., arXiv:2106.02848, "prv") needs 5 %
less noise for epsilon 6, delta 1e-5, q 0.015 and 480 steps (0.66, not 0.70), but takes ten times as
long, fails at q = 1 and overflows at loose budgets (Opacus 1.6).

Of Opacus we use the accountant and the hooks that give gradients by record. Clipping and noise are
here, because its optimizer takes noise from torch's generators, which are predictable from their
output, and its `secure_mode` needs torchcsprng, which no longer builds. Samples and noise here are
from the operating system's generator (os.urandom): with a seed the noise could be subtracted.
As in `secure_mode`, each noise value is half the sum of four Gaussians in float64, so that the gaps
between floating point numbers reveal nothing (Holohan and Braghin, arXiv:2107.10138).

The budget in a run, its plan and the steps that are spent, is in a durable file:

    {"run":"notes","client":"site-a","epsilon":6.0,"delta":1e-05,"sample_rate":0.015,
     "noise":0.6967,"steps":480,"done":37,"crc":"1c291ca3"}

One checksummed line, mode 0600, in a folder beside the site's keys. A step is counted there,
durably, before its records are drawn. A crash therefore loses training and never a count, and a
relaunch goes on with the same noise from the same count. Each count reads the file again under a
lock, so that two processes of one client spend one budget.

The name of the file is RUN@CLIENT.json: a budget is that of a client's name in a run's name. Two
runs are two budgets: a record that takes part in both has lost the sum of their epsilons (and of
their deltas), and so has one that is in the data of two clients. Nothing adds that up. A run that
begins anew under the same name goes on with the old budget. Removing the file forgets what
was spent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import asdict, evolve, fields_dict, frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from fsl_async.errors import ConfigError, PrivacyError, TaskError, disk_words, one_line
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import locked_folder, replace_bytes
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.models.hf import extra
from fsl_async.roles.names import NAME
from fsl_async.roles.sync.delta import EPSILON, NOISE, PRIVATE_STEPS, SAMPLE_RATE

_MAX_BYTES = 4096


@frozen(kw_only=True)
class Spent:
    """A client's plan in a run, and how much of it is spent: the content of the file.

    epsilon, delta: the budget of a record over all steps. sample_rate: probability with which a
    record takes part in a step. noise: standard deviation, in units of the clipping norm; 0: not
    computed yet. steps: of this client in the whole run; done: those that are counted.
    """

    run: str
    client: str
    epsilon: float
    delta: float
    sample_rate: float
    noise: float = 0.0
    steps: int
    done: int = 0


class Budget:
    """The budget of a client in a run. Raises PrivacyError, in one line.

    folder: of the file. plan: without noise. noise_for: the noise that keeps a plan within its
    budget; called once in a run. Later starts of the run keep the first plan, also where the run
    got longer meanwhile.
    """

    def __init__(self, folder: Path, plan: Spent, noise_for: Callable[[Spent], float]) -> None:
        run, client = plan.run, plan.client
        if not NAME.fullmatch(run) or not NAME.fullmatch(client):
            raise PrivacyError(f"privacy budget: {run[:80]!r} or {client[:80]!r} is no name")
        self.path = folder / f"{run}@{client}.json"
        with self._locked():
            found = self._read()
            if found is None:
                found = evolve(plan, noise=noise_for(plan))
                self._write(found)
        self.spent = found
        for name in ("run", "client", "epsilon", "delta", "sample_rate"):
            asked, planned = getattr(plan, name), getattr(found, name)
            if planned != asked:
                raise PrivacyError(
                    f"{self.path}: the privacy budget was planned with {name} {planned}, and this"
                    f" start has {asked}; go on with the same data and settings, or take part in a"
                    " new run, which spends a budget of its own"
                )

    def charge(self) -> None:
        """Count one more step; it is durable on return. PrivacyError: none is left."""
        with self._locked():
            found = self._read()
            if found is None:
                raise PrivacyError(f"{self.path} is gone: restore it, it counts what was spent")
            # A file that was restored from a backup has an old count.
            done = max(found.done, self.spent.done)
            if done >= self.spent.steps:
                raise PrivacyError(
                    f"the privacy budget of run {found.run} is used up: {found.client} has made"
                    f" all {found.steps:,} steps that epsilon {found.epsilon:g} allows (steps lost"
                    f" in crashes count too); {self.path} has the count"
                )
            counted = evolve(self.spent, done=done + 1)
            self._write(counted)
        self.spent = counted

    def _read(self) -> Spent | None:
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PrivacyError(f"{self.path}: {error.strerror}") from None
        found = _parsed(data)
        if found is None:
            raise PrivacyError(
                f"{self.path}: damaged; restore it from a backup: without it nothing tells how much"
                " of the privacy budget is spent"
            )
        return found

    def _write(self, spent: Spent) -> None:
        replace_bytes(self.path, to_checksummed(asdict(spent)) + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with locked_folder(self.path.parent):
                yield
        except OSError as error:
            raise PrivacyError(f"privacy budget: {disk_words(error, advised=False)}") from None


def _parsed(data: bytes) -> Spent | None:
    """The content of a file; None: damaged."""
    members = from_checksummed(data.removesuffix(b"\n"))
    if members is None:
        return None
    kinds: dict[str, Any] = {"str": str, "float": float, "int": int}
    for name, one in fields_dict(Spent).items():
        if type(members.get(name)) is not kinds[str(one.type)]:
            return None
    if len(members) != len(fields_dict(Spent)) or not 0 <= members["done"] <= members["steps"]:
        return None
    return Spent(**members)


Entropy = Callable[[int], bytes]
"""Gives so many random bytes."""

_ORDERS: tuple[int, ...] = (*range(2, 64), 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_FRACTIONS: tuple[float, ...] = (1.1, 1.2, 1.35, 1.5, 1.75, 2.25, 2.5, 2.75, 3.5, 4.5, 5.5)
"""Orders of Renyi divergence among which the best is chosen. Small budgets need large orders;
fractional ones, whose sums are long where there is much noise, help large budgets only."""
_FRACTIONS_FROM = 3.0  # epsilon
_TOLERANCE = 1e-3  # of the budget, which the noise may leave unused
_WORD_BYTES = 8
_SUMMED = 4  # Gaussians in a noise value


class Privacy:
    """Private gradients of the weights of `model` that train.

    Raises PrivacyError: no step is left, or the budget's file is damaged or of other data;
    ConfigError: no Opacus, or weights whose gradients cannot be told apart by record.
    """

    def __init__(
        self, model: nn.Module, budget: Budget, *, clip: float, batch: int, entropy: Entropy
    ) -> None:
        self.batch = batch
        """Records that a step expects: of `fed.step`, and the divisor of gradients."""
        self._budget = budget
        self._clip = clip
        self._entropy = entropy
        self._weights = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._sums: dict[str, Tensor] | None = None  # of a step that was counted and has no noise
        factors = [name for name in self._weights if "lora_A" in name.split(".")]
        if factors:
            raise ConfigError(
                f"{factors[0]} trains, and with tune.dp_epsilon factor A must not: tune.rule must"
                " be ffa or fedsvd",
                "tune.rule",
            )
        hooks = extra("opacus.grad_sample.grad_sample_module", "dp").GradSampleHooks
        try:
            self._hooks = hooks(model, loss_reduction="sum", strict=True)
        except NotImplementedError as error:
            raise ConfigError(f"tune.dp_epsilon: {one_line(str(error))}", "tune.full") from error

    @classmethod
    def of(
        cls,
        fed: Fed,
        model: nn.Module,
        records: int,
        *,
        folder: Path | None = None,
        entropy: Entropy = os.urandom,
    ) -> Privacy:
        """Make that of a client in a run, by `tune.dp_epsilon`, `dp_delta` and `dp_clip`.

        model: with adapters, after `fed.lora`. records: of this site that may take part. folder: of
        the budget's file instead of the one beside the site's keys. entropy: for tests.

        Every delta reports the epsilon that is spent, with what it follows from.
        """
        tune, run = fed.settings.tune, fed.settings.run
        rounds, batch = run.rounds, fed.settings.train.batch
        place = folder or fed.privacy_folder
        if not rounds:
            raise ConfigError("tune.dp_epsilon needs run.rounds: it is for all of them")
        if place is None:
            raise TaskError("private training needs a folder for its budget: give folder=")
        if records < 1:
            raise TaskError("private training needs a record")
        batch = min(batch, records)
        plan = Spent(
            run=run.name,
            client=fed.client_name,
            epsilon=tune.dp_epsilon,
            delta=tune.dp_delta,
            sample_rate=batch / records,
            steps=rounds * tune.steps,
        )
        budget = Budget(place, plan, noise_for)
        made = cls(model, budget, clip=tune.dp_clip, batch=batch, entropy=entropy)
        fed.add_facts(made.facts)
        spent = budget.spent
        fed.log(
            f"private training: epsilon {spent.epsilon:g}, delta {spent.delta:g} for each of"
            f" {records:,} records, clip {tune.dp_clip:g}, noise {spent.noise:.4g}, step"
            f" {spent.done:,} of {spent.steps:,}; {budget.path}"
        )
        return made

    @property
    def epsilon(self) -> float:
        """What is spent so far; it never falls."""
        return epsilon_of(self._budget.spent)

    def facts(self) -> dict[str, float]:
        """Of every delta: epsilon, and noise, sample rate and steps, from which it follows."""
        spent = self._budget.spent
        return {
            EPSILON: self.epsilon,
            NOISE: spent.noise,
            SAMPLE_RATE: spent.sample_rate,
            PRIVATE_STEPS: float(spent.done),
        }

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Numbers of the records of each step, rising; sometimes there is none.

        PrivacyError: no step is left.
        """
        records = round(self.batch / self._budget.spent.sample_rate)
        while True:
            self._budget.charge()
            self._sums = {}
            yield poisson_sample(records, self._budget.spent.sample_rate, self._entropy)

    def accumulate(self, losses: Tensor) -> None:
        """Add the clipped gradients of records. A batch may come in parts.

        losses: (N,), one of each record, of one forward pass in training mode of N x k sequences,
        those of a record side by side. A record whose gradient is not finite counts as none.
        """
        if self._sums is None:
            raise TaskError("private training: draw records from privacy.batches() first")
        with warnings.catch_warnings():
            # Of a first layer, whose inputs have no gradients.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            losses.sum().backward()  # type: ignore[no-untyped-call]
        found = {
            name: taken
            for name, weight in self._weights.items()
            if (taken := _taken(name, weight, len(losses))) is not None
        }
        squares = [
            torch.linalg.vector_norm(one.flatten(1), dim=1, dtype=torch.float64) ** 2
            for one in found.values()
        ]
        if not squares:
            raise TaskError(
                "private training: the losses depend on no weight that trains, or an earlier"
                " forward pass in training mode had no backward pass"
            )
        norms = torch.stack(squares).sum(0).sqrt()
        # A little more than the norm, so that rounding exceeds no bound.
        factors = self._clip / (norms * (1 + 1e-6)).clamp(min=self._clip)
        is_finite = torch.isfinite(norms)
        for name, one in found.items():
            kept = one.flatten(1)[is_finite].float()
            total = (factors[is_finite].float() @ kept).view_as(self._weights[name])
            before = self._sums.get(name)
            self._sums[name] = total if before is None else before + total

    def noise(self) -> None:
        """Set each weight's gradient: the sum of this step with noise, over the expected batch."""
        if self._sums is None:
            raise TaskError("private training: each batch gets its noise once")
        sums, self._sums = self._sums, None
        deviation = self._budget.spent.noise * self._clip
        drawn = gaussians(sum(one.numel() for one in self._weights.values()), self._entropy)
        begin = 0
        for name, weight in self._weights.items():
            end = begin + weight.numel()
            made = torch.from_numpy(deviation * drawn[begin:end]).view_as(weight)
            if name in sums:
                made += sums[name].to("cpu", torch.float64)
            weight.grad = (made / self.batch).to(weight.device, weight.dtype)
            begin = end

    def close(self) -> None:
        """Take the hooks out of the model."""
        self._hooks.cleanup()


def _taken(name: str, weight: Any, records: int) -> Tensor | None:
    """Gradients by record, (N, *shape), taken off a weight; None: the losses do not depend on it.

    Its summed gradient, which has no noise, is removed.
    """
    each = weight.grad_sample
    weight.grad_sample = weight.grad = None
    if each is None:
        return None
    if not isinstance(each, Tensor):
        raise TaskError("private training: give the losses of one forward pass at a time")
    if not records or len(each) % records:
        raise ConfigError(
            f"the gradient of {name} cannot be told apart by record: it must not train with"
            " tune.dp_epsilon (tune.full)",
            "tune.full",
        )
    return each if len(each) == records else each.view(records, -1, *each.shape[1:]).sum(1)


def poisson_sample(records: int, rate: float, entropy: Entropy) -> NDArray[np.int64]:
    """Choose each of `records` numbers with probability `rate`, independently. Rising, int64."""
    return np.flatnonzero(_uniform(records, entropy) < rate)


def gaussians(count: int, entropy: Entropy) -> NDArray[np.float64]:
    """Draw `count` standard Gaussians (Box and Muller), each of four: see above."""
    pairs = (count + 1) // 2
    total = np.zeros((2, pairs))
    for _ in range(_SUMMED):
        # In (0, 1], so that the logarithm is finite.
        radius = np.sqrt(-2.0 * np.log1p(-_uniform(pairs, entropy)))
        angle = 2.0 * math.pi * _uniform(pairs, entropy)
        total += radius * np.stack((np.cos(angle), np.sin(angle)))
    made: NDArray[np.float64] = total.reshape(-1)[:count] / math.sqrt(_SUMMED)
    return made


def _uniform(count: int, entropy: Entropy) -> NDArray[np.float64]:
    """Draw from [0, 1) in steps of 2^-53."""
    words = np.frombuffer(entropy(_WORD_BYTES * count), "<u8")
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


# --- accounting ---


def noise_for(plan: Spent) -> float:
    """The least noise, in units of the clipping norm, with which all steps keep the budget."""
    least = 2 * _bound_of_endless_noise(plan.delta)
    if plan.epsilon < least:
        raise PrivacyError(
            f"tune.dp_epsilon = {plan.epsilon:g} is less than can be accounted for with"
            f" tune.dp_delta = {plan.delta:g}: at least {least:.2g}"
        )
    with _bounds_may_be_loose():
        found = extra("opacus.accountants.utils", "dp").get_noise_multiplier(
            target_epsilon=plan.epsilon,
            target_delta=plan.delta,
            sample_rate=plan.sample_rate,
            steps=plan.steps,
            accountant="rdp",
            epsilon_tolerance=_TOLERANCE * plan.epsilon,
            alphas=_orders(plan.epsilon),
        )
    return float(found)


def _orders(epsilon: float) -> list[float]:
    """Orders for a budget, rising; the same at its planning and at every look at what is spent."""
    return sorted((*_ORDERS, *(_FRACTIONS if epsilon > _FRACTIONS_FROM else ())))


def _bound_of_endless_noise(delta: float) -> float:
    """Epsilon at `delta` where all divergences are 0 (Balle et al., arXiv:1905.09982)."""
    return min(
        math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        for order in _ORDERS
    )


@functools.lru_cache(maxsize=8)
def epsilon_of(spent: Spent) -> float:
    """Epsilon of the steps that are done, at the budget's delta; 0 before the first."""
    if not spent.done:
        return 0.0
    accountant = extra("opacus.accountants", "dp").RDPAccountant()
    accountant.history = [(spent.noise, spent.sample_rate, spent.done)]
    with _bounds_may_be_loose():
        # The bound of few steps with a large delta may be below 0.
        orders = _orders(spent.epsilon)
        return max(0.0, float(accountant.get_epsilon(spent.delta, alphas=orders)))


def _bounds_may_be_loose() -> warnings.catch_warnings[None]:
    """Within it Opacus does not warn that more orders might give a smaller bound."""
    return warnings.catch_warnings(action="ignore")
