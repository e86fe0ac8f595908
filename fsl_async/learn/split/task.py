"""The built-in task of split learning.

Batches are a function of the run's seed, the shard and the round (samples.py): a client that is
launched again goes on where the run is.
"""

from typing import Any

import torch

from fsl_async.config.load import from_tables
from fsl_async.config.settings import Config
from fsl_async.config.split_rules import split_method
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.data.facts import facts_of
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.learn.split.build import build_parts, client_options, client_part
from fsl_async.learn.split.remote import SplitTraining, open_training
from fsl_async.learn.split.samples import open_samples
from fsl_async.process.memory import MemoryMark

__all__ = ["begin", "train"]


def warm_up() -> None:
    """A step of a tiny model, then mark memory.

    What torch loads at its first step is not the model's.
    """
    model = GPT(GPTConfig(layers=1, width=8, heads=2, context=8))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    MemoryMark.take()


def config_of(fed: Fed) -> Config:
    """The run's configuration, as this client was handed it."""
    tables: dict[str, Any] = {name: dict(table) for name, table in fed.config.items()}
    return from_tables(tables)


def begin(fed: Fed, config: Config | None = None) -> SplitTraining:
    """Build this client's part of the run's model and open its session with the split server.

    For loops of your own too.
    """
    config = config or config_of(fed)
    method = split_method(config)
    parts = build_parts(config, at_client=True)
    for module in (parts.model.client, parts.model.tail, parts.auxiliary):
        if module is not None:
            module.to(fed.device)
    options = client_options(config, fed.client_name, method.in_flight)
    part = client_part(method, parts.model, options, parts.auxiliary)
    classes, architecture = facts_of(config).classes, parts.architecture
    features = parts.features
    del parts  # the split server's part of a model that was built whole
    return open_training(
        fed, part, method, classes=classes, architecture=architecture, features=features
    )


def _held(training: SplitTraining) -> int:
    """Bytes of this client's weights, and of the vector from which deltas are computed."""
    part, averaged = training.part, training.method.averaged
    tensors = [*part.model.parameters(), *part.model.buffers()]
    if part.auxiliary is not None:
        tensors += [*part.auxiliary.parameters(), *part.auxiliary.buffers()]
    weights = {id(each): each.numel() * each.element_size() for each in tensors}
    return sum(weights.values()) + sum(part.export(name).nbytes for name in averaged)


def train(fed: Fed) -> None:
    """Train until the run ends."""
    training = _train(fed)
    method = training.method
    if method.aligned and method.rules.align_every and not training.installed:
        fed.log(
            f"{fed.client_name} has trained with the auxiliary model that it began with:"
            " the run ended before an aligned one was there"
        )


def _train(fed: Fed) -> SplitTraining:
    warm_up()
    config = config_of(fed)
    samples = open_samples(config, facts_of(config), fed.part)
    training = begin(fed, config)
    MemoryMark.take(_held(training))
    for number in fed.rounds():
        trained = 0
        for batch in samples.round(number):
            if not fed.running:
                return training
            training.train_batch(batch.inputs, batch.labels, batch.lengths)
            trained += len(batch.inputs)
        if not fed.end_round(samples=trained):
            break
    return training
