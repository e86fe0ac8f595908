"""Products merge: merges a round's deltas by a rule of adapters, module by module.

For rules of federated LoRA that need a module's factors of all sites together
(`AdapterRule.merges_products`). A merge reads the deltas once, in flat order, and gives the average
in the same order, so it holds one module per client, one chunk per client, and the pieces of one
chunk of the result.

Signs are those of the outer step, which must be plain averaging with a rate of one:

    average = W + r - wanted        W: the weights; r: what coding has kept back so far (residual)
    desired = -average + r          so W + desired = wanted

Per tensor: factors are what the rule makes of them; a patch is `-growth`; tensors that are trained
whole are the weighted mean of the deltas. Rules that keep what they owe give it with the average,
as a second row.

Where some sites take steps of zeroth order, each order is averaged within itself, and the two are
added (`fsl_async.store.merge.merge.SumMerge`).

Only deltas from the newest version count: those of older ones are in another basis. A delta that
was accepted in time and stored too late is left out, as is one without weight. Where none is left,
no site has moved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from fsl_async.roles.sync.delta import ORDER, RANK
from fsl_async.store.errors import NotFinite
from fsl_async.store.merge.merge import Average
from fsl_async.store.merge.merge_rows import SpooledMerge, by_client
from fsl_async.store.rules.adapters import (
    Current,
    Draw,
    Factors,
    Site,
    adapter_modules,
)
from fsl_async.store.rules.outer import squared_norm
from fsl_async.store.versions.checkpoint import OWED, RESIDUAL, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.deltas.spool import Spool
    from fsl_async.store.disk.chunk_pool import ChunkPool
    from fsl_async.store.merge.merge import Round
    from fsl_async.store.model.manifest import Manifest, TensorPart, TensorSpec
    from fsl_async.store.rules.adapters import AdapterLayout, AdapterRule, Module
    from fsl_async.store.settings import StoreSettings
    from fsl_async.store.vectors.vectors import Vectors

    Rows = NDArray[np.float32]
    Clients = Sequence[Sequence[DeltaKey]]
    Reported = Mapping[DeltaKey, Mapping[str, object]]

LARGEST_PRODUCT = 1e9
"""Largest product of the norms of a module's factors at a site.

A product squares what a delta holds: one far below the limit of a delta's norm left fp32 in one
version. Adapters in training stay below 1e4; sums of 1e9 over any run are far inside fp32.
"""


@frozen
class _Member:
    """A client of the round: its share of the weights, and the rank of its adapters."""

    weight: float
    rank: int
    is_zeroth: bool = False


class ProductsMerge(SpooledMerge):
    """The merge of a run whose rule of adapters merges products."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, settings: StoreSettings
    ) -> None:
        super().__init__(manifest, spool, pool, settings)
        assert settings.product_rule is not None, "there is one"
        self._rule: AdapterRule = settings.product_rule
        self._layout: AdapterLayout = adapter_modules(manifest, self._rule)
        self._outputs = 1 + self._rule.keeps_owed

    def too_large(self, moved: float, vectors: Vectors) -> tuple[str, bool] | None:
        """See `Merge.too_large`: products may leave fp32. A factor moves by `moved` at most."""
        found = []
        for module in self._layout.modules:
            spans = (slice(one.offset, one.offset + one.values) for one in _pair(module))
            a, b = (math.sqrt(squared_norm(vectors.named[WEIGHTS][span])) for span in spans)
            found.append(((a + moved) * (b + moved), a * b, module.name))
        bound, held, name = max(found)
        limit = f"above {LARGEST_PRODUCT:g} in {name!r}"
        return (limit, held > LARGEST_PRODUCT) if bound > LARGEST_PRODUCT else None

    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        """A chunk of the vectors is not read any more when it is yielded: it may change then."""
        weights = {one.key: one.weight for one in a_round.merged}
        clips = {one.key: one.clip for one in a_round.merged}
        clients = self._fresh(weights, a_round.version)
        facts = {key: a_round.deltas[key].delta.facts for keys in clients for key in keys}
        members = self._members(clients, weights, facts)
        # A client's row is the mean of its deltas.
        factors = {
            key: clips[key] * weights[key] / math.fsum(weights[one] for one in keys)
            for keys in clients
            for key in keys
        }
        norms = dict.fromkeys((keys[0].client for keys in clients), 0.0)
        chunks = self._pool.each(self._rows(clients, factors), range(self._manifest.chunks))
        pieces = self._pieces(chunks, members, vectors, a_round.version, norms)
        made = _in_chunks(pieces, self._manifest)
        return Average((_given(one) for one in made), set(factors), product_norms=norms)

    def _fresh(self, weights: Mapping[DeltaKey, float], version: int) -> Clients:
        """Return the keys of each client that count in a merge to `version`."""
        return by_client(key for key in weights if key.base == version - 1 and weights[key])

    def _members(
        self, clients: Clients, weight_of: Mapping[DeltaKey, float], facts: Reported
    ) -> list[_Member]:
        """Return the members, whose weights add up to 1 in each order of steps."""
        weights = [math.fsum(weight_of[key] for key in keys) for keys in clients]
        zeroth = [all(facts[key].get(ORDER) == 0 for key in keys) for keys in clients]
        totals = {
            order: math.fsum(
                one for one, is_zeroth in zip(weights, zeroth, strict=True) if is_zeroth == order
            )
            for order in (False, True)
        }
        return [
            _Member(
                weight / totals[is_zeroth], max(self._rank(facts[key]) for key in keys), is_zeroth
            )
            for keys, weight, is_zeroth in zip(clients, weights, zeroth, strict=True)
        ]

    def _rank(self, reported: Mapping[str, object]) -> int:
        most, rank = self._layout.rank, reported.get(RANK)
        if not self._rule.unequal_ranks or not isinstance(rank, int | float):
            return most
        return int(min(max(rank, 1), most))

    def _pieces(
        self,
        chunks: Iterable[Rows],
        members: Sequence[_Member],
        vectors: Vectors,
        version: int,
        norms: dict[str, float],
    ) -> Iterator[Rows]:
        """Yield the result in flat order, in arrays of any length. chunks: of the sites' deltas."""
        factors = {one.name: module for module in self._layout.modules for one in _pair(module)}
        patches = {one.patch.name: one for one in self._layout.modules if one.patch is not None}
        growth: dict[str, Factors] = {}
        deltas = np.empty((0, 0), np.float32)
        squared = dict.fromkeys(norms, 0.0)
        for index, rows in enumerate(chunks):
            for part in self._manifest.parts(index):
                name, values = part.tensor.name, rows[:, part.place]
                if name in patches:
                    yield self._row(-_dense(growth[name], part))
                    continue
                if name not in factors:
                    yield self._row(_mean(values, members))
                    continue
                module = factors[name]
                start, stop = _span(module)
                place = part.tensor.offset - start + part.start
                if place == 0:
                    deltas = np.empty((len(members), stop - start), np.float32)
                deltas[:, place : place + values.shape[1]] = values
                if place + values.shape[1] == stop - start:
                    piece, grown = self._merge(
                        module, deltas, members, vectors=vectors, version=version, squared=squared
                    )
                    if module.patch is not None and grown is not None:
                        growth[module.patch.name] = grown
                    yield piece
        norms |= {client: math.sqrt(total) for client, total in squared.items()}

    def _row(self, average: NDArray[np.float64]) -> Rows:
        """Return a piece of which nothing is owed."""
        piece = np.zeros((self._outputs, len(average)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            piece[0] = average
        return piece

    def _merge(
        self,
        module: Module,
        deltas: Rows,
        members: Sequence[_Member],
        *,
        vectors: Vectors,
        version: int,
        squared: dict[str, float],
    ) -> tuple[Rows, Factors | None]:
        """Merge one module; return its piece of the result, and what its patch grows by."""
        scale, seed = self._settings.adapter_scale, self._settings.adapter_seed
        start, stop = _span(module)
        held = vectors.named[WEIGHTS][start:stop].astype(np.float64)
        unsent = _wide(vectors.named.get(RESIDUAL), start, stop)
        owed = _wide(vectors.named.get(OWED), start, stop)
        current = Current(
            _factors(module, held),
            None if unsent is None else _factors(module, unsent),
            None if owed is None else _factors(module, owed),
        )
        sites = [
            Site(member.weight, member.rank, _factors(module, held - delta))
            for member, delta in zip(members, deltas, strict=True)
        ]
        for client, site in zip(squared, sites, strict=False):
            squared[client] += (scale * self._rule.site_norm(site, current)) ** 2
        # A round in which no site has moved; and what both orders of steps start from, which
        # counts once where each of them is averaged within itself.
        still = [Site(1.0, module.rank, current.factors)]
        if len({member.is_zeroth for member in members}) > 1:
            sites.append(Site(-1.0, module.rank, current.factors))
        try:
            merged = self._rule.merge(
                current, sites or still, scale, Draw(seed, version, module.index)
            )
        except np.linalg.LinAlgError as error:
            raise NotFinite(f"the factors of {module.name!r} cannot be merged ({error})") from error
        wanted = held if unsent is None else held + unsent
        piece = self._row(wanted - _flat(merged.factors))
        if merged.owed is not None:
            piece[1] = self._row(_flat(merged.owed))[0]
        return piece, merged.patch


def _given(chunk: Rows) -> Callable[[Rows], Rows]:
    return lambda _: chunk


def _pair(module: Module) -> tuple[TensorSpec, ...]:
    assert module.a is not None, "product rules exchange both"
    return module.a, module.b


def _span(module: Module) -> tuple[int, int]:
    """Return where a module's factors begin and end in the flat vector."""
    first, second = _pair(module)
    return first.offset, second.offset + second.values


def _wide(vector: Rows | None, start: int, stop: int) -> NDArray[np.float64] | None:
    return None if vector is None else vector[start:stop].astype(np.float64)


def _factors(module: Module, values: NDArray[np.float64]) -> Factors:
    first, second = _pair(module)
    cut = first.values
    return Factors(values[:cut].reshape(first.shape), values[cut:].reshape(second.shape))


def _flat(factors: Factors) -> NDArray[np.float64]:
    return np.concatenate([factors.a.ravel(), factors.b.ravel()])


def _mean(values: Rows, members: Sequence[_Member]) -> NDArray[np.float64]:
    """Return the weighted mean of deltas, summed in the order of the clients."""
    total = np.zeros(values.shape[1])
    for member, row in zip(members, values, strict=True):
        total += member.weight * row.astype(np.float64)
    return total


def _dense(growth: Factors, part: TensorPart) -> NDArray[np.float64]:
    """Return the part of a patch that lies in a chunk: only its rows are formed."""
    columns = growth.a.shape[1]
    stop = part.start + part.place.stop - part.place.start
    first, last = part.start // columns, -(-stop // columns)
    block = (growth.b[:, first:last].T @ growth.a).ravel()
    return block[part.start - first * columns : stop - first * columns]


def _in_chunks(pieces: Iterable[Rows], manifest: Manifest) -> Iterator[Rows]:
    """Cut pieces of any length into chunks; one row becomes a vector."""
    index, waiting, have = 0, [], 0
    for piece in pieces:
        waiting.append(piece)
        have += piece.shape[1]
        while index < manifest.chunks and have >= manifest.chunk_values(index):
            count = manifest.chunk_values(index)
            joined = np.concatenate(waiting, axis=1) if len(waiting) > 1 else waiting[0]
            chunk, rest = joined[:, :count], joined[:, count:]
            waiting, have = [rest], rest.shape[1]
            index += 1
            yield chunk[0] if len(chunk) == 1 else chunk
