"""What `compare` compares: the options, checked. Pure."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from fsl_async.config.rules import is_own
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import METHODS

MODELS = ("small-cnn", "resnet18")
GPT = "gpt-"
SLOWEST_LEARNER = 1e-8


@frozen(kw_only=True)
class Choices:
    """One comparison. Every run has all of it in common but its method.

    samples: of a client in a round; 0 = all of its shard (text: 128 windows). cut: where the model
    is cut; "" = the model's default. alpha: of a Dirichlet partition of images; 0 = IID.
    up, down, models: formats of activations, gradients and weights. sets: table.key=value, further
    settings of the runs. given: options of the command line that a preset among them does not
    replace.
    """

    methods: tuple[str, ...]
    data: str
    model: str = "small-cnn"
    cut: str = ""
    sizes: str = ""
    auxiliary: str = "blocks:1"
    clients: int = 4
    rounds: int = 10
    target: float = 0.5
    batch: int = 32
    samples: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    optimizer: str = "adamw"
    upload_every: int = 5
    align_every: int = 2
    align_passes: int = 20
    align_rate: float = 3e-3
    buffer_samples: int = 256
    alpha: float = 0.0
    up: str = "bf16"
    down: str = "bf16"
    models: str = "fp32"
    step_log2: int = 14
    mode: str = "free"
    in_flight: int = 2
    seed: int = 0
    evaluates: bool = True
    stops_at_target: bool = False
    sets: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.methods:
            raise UsageError(f"--methods: name at least one of {', '.join(METHODS)}")
        if not 0 < self.target <= 1:
            raise UsageError(
                f"--target-accuracy {self.target:g}:"
                " a share of right answers, above 0 and at most 1"
            )
        if not (self.model in MODELS or self.is_text or is_own(self.model)):
            known = ", ".join(MODELS)
            raise UsageError(
                f"--model {self.model[:80]!r} is unknown; known: {known},"
                " for text gpt-0.5m, gpt-1m, ..., and your own FILE.py:FUNCTION"
            )
        if not SLOWEST_LEARNER <= self.learning_rate <= 10:
            raise UsageError(f"--learning-rate {self.learning_rate:g}: above 0, at most 10")

    @property
    def is_text(self) -> bool:
        """Whether the built-in GPT is trained, on text."""
        return self.model.startswith(GPT)

    @property
    def names(self) -> tuple[str, ...]:
        """The clients, in the order of their shards."""
        return tuple(f"client-{number}" for number in range(1, self.clients + 1))

    def versions(self, method: str) -> int:
        """Versions that the parameter server makes; where clients take turns each turn is one."""
        return self.rounds * self.turns(method)

    def turns(self, method: str) -> int:
        """Versions of one round: until every client has trained."""
        return self.clients if METHODS[method].sequential else 1

    def as_dict(self) -> dict[str, Any]:
        """For rows, and for nodes that are processes of their own."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Choices:
        """Undo `as_dict`, which may have been through JSON."""
        return cls(**found | {name: tuple(found[name]) for name in ("methods", "sets", "given")})


def parse_methods(text: str) -> tuple[str, ...]:
    """Read "sl,fedavg": names in the order given, each once.

    Raises UsageError for a name that is none.
    """
    found: list[str] = []
    for name in filter(None, (part.strip().lower() for part in text.split(","))):
        if name not in METHODS:
            raise UsageError(f"--methods: {name[:80]!r} is unknown; known: {', '.join(METHODS)}")
        if name not in found:
            found.append(name)
    if not found:
        raise UsageError(f"--methods: name at least one of {', '.join(METHODS)}")
    return tuple(found)
