"""The built-in task on tokens of texts, alone in one process."""

import math
import os

import numpy as np
import pytest
import torch
from token_texts import texts, write_lines, write_parquet, write_tokenizer

from fsl_async.errors import FslError
from fsl_async.learn.client import pretrain, token_data
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.token_data import TokenData, run_coder
from fsl_async.learn.data import packing
from fsl_async.learn.data.tokenizer import facts_of
from fsl_async.learn.models.gpt import GPT, GPTConfig

pytest.importorskip("tokenizers", reason="the extra hf is not installed")
pytest.importorskip("pyarrow", reason="the extra hf is not installed")


@pytest.fixture
def config(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    facts = facts_of(str(tokenizer))
    model = {"preset": "0.5m", "layers": 1, "width": 32, "heads": 2, "context": 32}
    return {
        "model": {**model, "tokenizer": facts.digest, "vocabulary": facts.vocabulary},
        "data": {
            "path": str(write_parquet(tmp_path / "corpus", texts(600))),
            "tokenizer": str(tokenizer),
            "holdout": 0.02,
        },
        "train": {"batch": 8, "learning_rate": 1e-2, "warmup_steps": 5, "threads": 1},
    }


def fed_of(config, steps=25, **more):
    lines = []
    fed = LocalFed(ClientContext("a", config=config, log=lines.append, **more), steps=steps)
    fed.lines = lines
    return fed


def test_it_trains_tokens_and_reports_loss_by_token_and_bits_by_byte(config, tmp_path):
    """The vocabulary is the tokenizer's; a text of eight words has some fifty bytes."""
    fed = fed_of(config)
    pretrain.train(fed)
    assert fed.model.embedding.shape == (1010, 32)
    losses = [metrics["loss"] for _, metrics in fed.history]
    assert losses[0] == pytest.approx(math.log(1010), abs=0.3)
    assert losses[-1] < losses[0] - 1
    assert fed.status()["tokens"] == 25 * 8 * 32
    words = fed.lines[-1].split()
    assert words[2] == "nats/token"
    data = TokenData(fed, 32, 8)
    found = data.measure(fed.model)
    assert float(words[1]) == pytest.approx(found["eval_loss"], abs=1e-4)
    rows = texts(600)[-12:]
    tokens = sum(len(row.split()) + 1 for row in rows)
    bits = found["eval_loss"] * tokens / math.log(2) / sum(map(len, rows))
    assert found["eval_bits_per_byte"] == pytest.approx(bits)
    # By bytes, of the same texts: the same text is measured.
    lines = write_lines(tmp_path / "lines.jsonl", texts(600))
    plain = {**config, "model": {**config["model"], "tokenizer": "", "vocabulary": 0}}
    by_bytes = fed_of({**plain, "data": {"path": str(lines), "holdout": 0.02}}, 2)
    pretrain.train(by_bytes)
    assert by_bytes.model.embedding.shape == (256, 32)
    assert "nats/byte" not in by_bytes.lines[-1]


def test_a_tokenizer_that_is_not_the_runs_is_refused_in_one_line(config, tmp_path):
    """Sites with other tokens would train another model without a trace."""
    cases = [
        ({"tokenizer": ""}, {}, "give this client the same with --tokenizer PATH_OR_NAME"),
        ({}, {"tokenizer": ""}, "this run trains on bytes"),
        (
            {"tokenizer": str(write_tokenizer(tmp_path / "other", 999))},
            {},
            "every site needs the same tokenizer.json",
        ),
        ({"tokenizer": str(tmp_path / "corpus")}, {}, "give a tokenizer.json, or a folder"),
    ]
    for data, model, text in cases:
        changed = {
            "data": {**config["data"], **data}, "model": {**config["model"], **model},
        }  # fmt: skip
        with pytest.raises(FslError, match=text) as refused:
            run_coder({**config, **changed})
        assert "\n" not in refused.value.message


def test_a_stream_goes_on_by_its_kept_state(config, tmp_path, monkeypatch):
    """Without reading what came before; where the state is lost, by reading it again."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    pytest.importorskip("datasets", reason="the extra datasets is not installed")
    monkeypatch.setattr(packing, "BLOCK_WINDOWS", 10)
    given = {**config["data"], "path": f"hf://{config['data']['path']}"}
    states = tmp_path / "streams" / "run-a.json"

    def opened(**more):
        fed = fed_of({**config, "data": given}, states_file=states, **more)
        data = TokenData(fed, 32, 8)
        return data, data.batches()

    def rows(drawn, count):
        return [next(drawn).tolist() for _ in range(count)]

    data, drawn = opened()
    before = rows(drawn, 7)
    position = data.facts()
    rest = rows(drawn, 6)
    assert data.facts() != position
    assert rows(opened()[1], 7) == before
    again, drawn = opened(position=position)
    assert again.packer.resume is not None
    assert rows(drawn, 6) == rest
    states.unlink()
    again, drawn = opened(position=position)
    assert again.packer.resume is None
    assert rows(drawn, 6) == rest
    states.write_text("[3")
    assert opened(position=position)[0].packer.resume is None
    assert token_data.KEPT_STATES > 1


@pytest.mark.parametrize("count", [2, 9, 17, 18, 8 * 8 + 1, 200])
def test_a_loss_in_batches_of_windows_is_that_of_each_window(count):
    """Whole windows are evaluated together; the rest is one of its own."""
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8))
    tokens = np.random.default_rng(0).integers(0, 256, count, dtype=np.int32)
    windows = [torch.from_numpy(tokens[at : at + 9])[None].long() for at in range(0, count - 1, 8)]
    with torch.no_grad():
        nats = sum(model.loss(one).item() * (one.numel() - 1) for one in windows)
    assert token_data.token_nats(model, tokens, 8) == pytest.approx(nats, rel=1e-5)
    with pytest.raises(FslError, match="nothing is held out"):
        token_data.token_nats(model, tokens[:1], 8)
