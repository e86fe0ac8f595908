"""Defines the table tune: fine-tuning of a base model that every site has. Pure.

The other tables are in `fsl_async.config.settings`.
"""

# ruff: noqa: RUF009 - `setting` makes an attrs field, not a shared default

from __future__ import annotations

from typing import Any, Literal

from attrs import frozen

from fsl_async.config.rules import SettingError, like, must_be_own_rule, setting, span

# The rules of fsl_async.store.rules.adapters, named again for type checkers.
AdapterRuleName = Literal[
    "fedit", "ffa", "rolora", "fedsvd", "fedex", "flora", "hetlora", "flexlora", "bank"
]
Objective = Literal["lm", "classify", "dpo", "kto", "simpo", "orpo", "reward", "grpo"]
TrainedOn = Literal["completion", "all"]

PRIVATE_RULES = ("ffa", "fedsvd")
"""Rules by which sites train factor B alone."""
SUM_RULES = ("fedit", "ffa", "rolora")
"""Rules that add up factors, as a secure sum and a radio channel do."""
PRODUCT_RULES = ("fedsvd", "fedex", "flora", "hetlora", "flexlora", "bank")
"""Rules that need a module's factors of all sites together."""
ROUND_RULES = ("rolora", *PRODUCT_RULES)
"""Rules that need every site to start a round from the newest version."""
BASIS_RULES = ("fedsvd", "flora", "flexlora", "bank")
"""Rules whose versions have factors in a new basis."""
HEADS = ("classify", "reward")
"""Objectives of models with a new head instead of a language model's."""
MIXED = ("kto", "orpo", "grpo")
"""Objectives in which the loss of a sample depends on others of its batch."""
BETA, SIMPO_BETA = 0.1, 2.0
"""Default strengths of preferences."""
RANK, BANK_RANK = 8, 16
"""Default ranks: of adapters that all sites train in full, and of a bank."""

_must_be_names = like(
    r"([A-Za-z0-9_.*-]{1,200}(,[A-Za-z0-9_.*-]{1,200}){0,63})?",
    "must be names of modules, like q_proj,v_proj",
)


def _must_be_labels(value: Any) -> str | None:
    names = value.split(",") if value else []
    if all(name.strip() for name in names) and len(set(names)) == len(names) != 1:
        return None
    return "must be two or more different names, like negative,positive"


@frozen(kw_only=True)
class TuneConfig:
    """Fine-tuning of a base model: adapters of low rank, or zeroth order (docs/TUNING.md)."""

    method: Literal["none", "lora", "zeroth"] = setting(
        "none",
        "none | lora (adapters of low rank) | zeroth (seeds and scalars, no gradients)",
        fixed=True,
    )
    rule: AdapterRuleName = setting(
        "fedit",
        "how adapters are merged: fedit (mean of both factors) | ffa | rolora | fedsvd | fedex |"
        " flora | hetlora | flexlora | bank (hybrid LoRA: ranks, layers and orders by site)",
        fixed=True,
    )
    merge: str = setting(
        "",
        "file.py:Class, your own merge of adapters; tune.rule = file.py:Class is the same. Sites"
        " train by the built-in rule that it derives from, which takes the place of tune.rule"
        " (docs/OWN_RULES.md)",
        must_be_own_rule,
    )
    base: str = setting(
        "",
        "folder of the base model in Hugging Face's format, or a GGUF file; each site gives its own"
        " with --base; never sent",
    )
    rank: int = setting(
        0,
        "rank of the adapters; with hetlora, flexlora and bank the largest one: a client may have"
        " a smaller --rank; 0 = 8, with bank 16",
        span(least=0, most=4096),
        fixed=True,
    )
    scale: float = setting(
        2.0, "adapters are scaled by this, whatever their rank", span(above=0, most=1e4), fixed=True
    )
    targets: str = setting(
        "",
        "last names of the linear layers that get adapters, like q_proj,v_proj; empty = all but"
        " heads, tied layers and experts; none = only weights named by tune.full, and heads, train",
        _must_be_names,
        fixed=True,
    )
    full: str = setting(
        "",
        "patterns of names of weights that train whole, like *.norm.weight; heads of classifiers"
        " always do",
        _must_be_names,
        fixed=True,
    )
    objective: Objective = setting(
        "lm",
        "lm (next token) | classify (labels) | dpo, simpo, orpo (chosen and rejected completions) |"
        " kto (completions, each good or bad) | reward (a head that learns from such pairs) | grpo"
        " (each site's reward function rates answers of the model; clients give --reward)",
        fixed=True,
    )
    labels: str = setting(
        "", "of classify: the names of the labels, like negative,positive", _must_be_labels,
        fixed=True,
    )  # fmt: skip
    balance: bool = setting(
        True,
        "of classify: sites draw as many rows of each label that they have, and weigh by how"
        " balanced their labels are, so that sites of one label do not move the threshold; with"
        " guard.evaluator they only draw so",
        fixed=True,
    )
    trained_on: TrainedOn = setting(
        "completion", "of lm: completion (not the prompt) | all", fixed=True
    )
    context: int = setting(
        512, "tokens at which samples are cut", span(least=8, most=1 << 20), fixed=True
    )
    steps: int = setting(
        20,
        "steps of a client in a round, where clients train by rounds; with sync.pace = own the"
        " most from one delta to the next",
        span(least=1, most=1 << 30),
    )
    base_check: Literal["values", "shapes"] = setting(
        "values",
        "values (the base must be equal at all clients to the last bit of fp32) | shapes (for a"
        " base that clients quantize on their own, or not at all)",
        fixed=True,
    )
    head: Literal["auto", "home", "shared"] = setting(
        "auto",
        "of classify and reward: where the new head is: home (each site trains and keeps its own) |"
        " shared; auto = home for reward, shared for classify",
        fixed=True,
    )
    beta: float = setting(
        0.0,
        "how much preferences count: of dpo and kto, how strongly the base holds the model back; of"
        " orpo, the weight of the odds; of simpo, that of the margin; 0 = 0.1, of simpo 2",
        span(least=0, most=100),
    )
    gamma: float = setting(
        0.5, "of simpo: margin by which the chosen completion should lead", span(least=0, most=100)
    )
    group: int = setting(
        8,
        "of grpo: answers to each prompt; a step has train.batch prompts",
        span(least=2, most=1024),
    )
    same_rewards: bool = setting(
        True,
        "of grpo: any site's reward function rates any prompt alike, so clients that train rate"
        " some answers of others (--rollout) again, and use none of a client that lies",
    )
    answer_tokens: int = setting(
        64, "of grpo: tokens of an answer at most", span(least=1, most=1 << 16)
    )
    kl: float = setting(
        0.01, "of grpo: weight of the distance from the base", span(least=0, most=100)
    )
    kl_limit: float = setting(
        0.0,
        "of grpo: nats of an answer from the base above which rewards count less, and not at all at"
        " twice as many; 0 = no limit",
        span(least=0, most=1e6),
    )
    zo_probes: int = setting(
        5, "zeroth order: directions in a step", span(least=1, most=1024), fixed=True
    )
    zo_steps: int = setting(
        1, "zeroth order: steps of a client in a round", span(least=1, most=1024), fixed=True
    )
    zo_mu: float = setting(
        1e-3, "zeroth order: distance of a probe from the weights", span(above=0, most=10)
    )
    zo_rate: float = setting(1e-3, "zeroth order: learning rate", span(above=0, most=10))
    zo_history: int = setting(
        1000,
        "zeroth order: versions that a returning client replays at most; else it fetches all"
        " weights",
        span(least=1, most=1_000_000),
    )
    dp_epsilon: float = setting(
        0.0,
        "privacy budget of each record at a site, over the whole run (extra dp); 0 = no noise",
        span(least=0, most=1e4),
        fixed=True,
    )
    dp_delta: float = setting(
        1e-5,
        "probability with which the budget may be exceeded",
        span(above=0, most=0.1),
        fixed=True,
    )
    dp_clip: float = setting(
        1.0, "norm to which each record's gradient is clipped", span(above=0, most=1e6), fixed=True
    )

    secure: bool = setting(
        False,
        "sites mask their deltas, and the parameter server learns their sum alone, of at least"
        " three sites (extra secure; docs/SECURITY.md)",
        fixed=True,
    )
    secure_bits: int = setting(
        6,
        "of tune.secure: bits of a value at a site; on the wire log2 of the sites more",
        span(least=3, most=16),
    )

    @property
    def is_on(self) -> bool:
        """Whether this run tunes a base model."""
        return self.method != "none"

    @property
    def by_rounds(self) -> bool:
        """Whether sites train by rounds: each starts from the newest version."""
        by_rule = self.rule in ROUND_RULES
        by_answers = self.is_on and self.objective == "grpo"
        return self.method == "zeroth" or by_rule or by_answers or self.is_private or self.secure

    @property
    def history(self) -> int:
        """Versions that a returning client replays at most; 0 where versions are no scalars."""
        return self.zo_history if self.method == "zeroth" else 0

    @property
    def is_private(self) -> bool:
        """Whether sites train with differential privacy."""
        return self.dp_epsilon > 0

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters, or of the bank."""
        return self.rank or (BANK_RANK if self.rule == "bank" else RANK)

    @property
    def strength(self) -> float:
        """`beta`, or its default."""
        return self.beta or (SIMPO_BETA if self.objective == "simpo" else BETA)

    @property
    def has_own_head(self) -> bool:
        """Whether each site keeps the new head."""
        default = "home" if self.objective == "reward" else "shared"
        return self.objective in HEADS and (self.head if self.head != "auto" else default) == "home"

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the head's outputs, in the order of their numbers: of classify the labels."""
        if self.objective == "reward":
            return ("reward",)
        return tuple(name.strip() for name in self.labels.split(",")) if self.labels else ()

    def __attrs_post_init__(self) -> None:
        if self.is_on and self.objective == "classify" and not self.labels:
            raise SettingError("tune.labels", "must name the labels of classify, like no,yes")
        if self.is_on and self.objective in MIXED and self.is_private:
            raise SettingError(
                "tune.objective",
                f"{self.objective} mixes records in a loss, so the noise of tune.dp_epsilon cannot"
                " cover each: take dpo, simpo or reward, or leave out tune.dp_epsilon",
            )
        if self.method == "zeroth" and self.objective == "grpo":
            raise SettingError("tune.objective", "grpo needs gradients: set tune.method = lora")
