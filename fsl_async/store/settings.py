"""Settings of a store: how it keeps and advances versions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen, validators

from fsl_async.store.deltas.delta_kind import DeltaKind, Dense
from fsl_async.store.rules.adapters import AdapterRule
from fsl_async.store.rules.aggregation import Mean, Rule
from fsl_async.store.rules.air import Channel
from fsl_async.store.rules.outer import OPTIMIZERS, Growing, OuterOptimizer
from fsl_codecs import CodecSpec

if TYPE_CHECKING:
    from fsl_async.store.merge.merge_upstream import Upstream


@frozen
class StoreSettings:
    """Settings by which the store keeps and advances versions."""

    keep_versions: int = field(default=3, validator=validators.ge(1))
    codec_down: CodecSpec = field(factory=lambda: CodecSpec(format="uniform"))
    outer: OuterOptimizer = field(factory=Growing)
    threads: int = field(default=1, validator=validators.ge(1))
    """Threads that decode chunks and write a version's files."""
    rule: Rule = field(factory=Mean)
    """The aggregation rule; only the mean for kinds that are not comparable."""
    reuse: int = field(default=0, validator=validators.ge(0))
    """Versions that the base of a delta that the rule uses again may be old; 0: it uses none."""
    kind: DeltaKind = field(factory=Dense)
    """Kind of the run's deltas. With full weights the average is the next version."""
    resident: bool = True
    """Whether vectors are in memory where they fit, else mapped from scratch files."""
    may_keep_mean: bool = True
    """Whether to count on a mean of versions in memory; a planned run has none."""
    snapshot_every: int = field(default=10, validator=validators.ge(1))
    """Versions after which a checkpoint must be whole before the next is made."""
    snapshot_every_s: float = field(default=1800.0, validator=validators.gt(0.0))
    """Seconds after which one must be whole before the next version is made."""
    snapshot_bytes_per_s: float = field(default=0.0, validator=validators.ge(0.0))
    """Limit of writing checkpoints that are not late; 0: none."""

    adapters: AdapterRule | None = None
    """Rule that merges adapters of low rank; None: the run has no adapters."""
    adapter_scale: float = 1.0
    """The scale of the product of an adapter's factors."""
    adapter_seed: int = 0
    """Seed of the run, for rules that draw factors again."""

    channel: Channel | None = None
    """Channel that adds up the deltas; None: each arrives by itself."""
    upstream: Upstream | None = None
    """Server above the cell whose store this is; None: it makes its versions itself."""

    history: int = field(default=0, validator=validators.ge(0))
    """Versions whose steps a returning client replays at most, in a run of zeroth order."""

    @property
    def product_rule(self) -> AdapterRule | None:
        """The rule of adapters, where it merges module by module; else deltas are a mean."""
        rule = self.adapters
        return rule if rule is not None and rule.merges_products else None

    @property
    def keeps_owed(self) -> bool:
        """Whether a version has a vector of what a rule could not fit into the rank."""
        return self.product_rule is not None and self.product_rule.keeps_owed

    @property
    def leaves_out(self) -> bool:
        """Whether rule or channel may leave out deltas, which are recorded with the weight 0."""
        by_rule = self.rule.by_rows or self.product_rule is not None
        return by_rule or self.channel is not None or self.upstream is not None

    @property
    def rule_name(self) -> str:
        """The rule of a merge, as recorded; with a channel, and an outer optimizer of one's own."""
        rule = self.rule if self.product_rule is None else self.product_rule
        names = [rule.name, *([] if self.channel is None else [self.channel.name])]
        names += [] if self.outer.name in OPTIMIZERS else [self.outer.name]
        return ", ".join(names)

    @property
    def sets_weights(self) -> bool:
        """Whether an average is the next version's weights, instead of a change of them."""
        return self.kind.is_full or self.kind.is_scalars

    @property
    def loses_in_coding(self) -> bool:
        """Whether a version's change loses something when it is coded: fp32 frames do not."""
        return not self.sets_weights and self.codec_down.format != "fp32"

    @property
    def most_unwhole(self) -> int:
        """Return the number of the newest versions that may have no vectors on disk.

        A version of full weights has no coded change from which it could be made too.
        """
        return 1 if self.kind.is_full else self.snapshot_every

    @property
    def remembered_versions(self) -> int:
        """Return the number of the newest versions that may have to be made again."""
        return self.keep_versions + 2 * (self.snapshot_every + 1)
