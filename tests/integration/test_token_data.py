"""Pretraining on tokens of texts, as processes: what each client trains is what its lease says."""

import signal
from itertools import islice

import pytest
from token_texts import texts, write_lines, write_parquet, write_tokenizer

from fsl_async.learn.data.packing import Packer, Position
from fsl_async.learn.data.sources import location_of, open_source
from fsl_async.learn.data.tokenizer import coder_of, facts_of

pytestmark = pytest.mark.slow
pytest.importorskip("tokenizers", reason="the extra hf is not installed")
pytest.importorskip("pyarrow", reason="the extra hf is not installed")

CONTEXT, BATCH = 32, 4


def client(site, name, data, tokenizer, *more):
    words = ("--name", name, "--data", data, "--tokenizer", tokenizer, *more)
    return site.start("--role", "client", *words, site.address)


def deltas_of(site, name):
    """(tokens, position, incarnation) of a client's acknowledged deltas."""
    found = [one for one in site.ledger("accepted") if one["key"].startswith(f"{name}/")]
    assert all(one["facts"]["data_check"] > 0 for one in found if one["tokens"])
    return [
        (one["tokens"], Position.from_facts(one["facts"]), one["key"].split("/")[1])
        for one in found
    ]


def check_each_sample_once(site, name, data, tokenizer):
    """The acknowledged deltas are the client's part of the data, in order, nothing twice."""
    deltas = deltas_of(site, name)
    shard = {one["name"]: one["index"] for one in site.ledger("lease")}[name]
    made = Packer(
        open_source(location_of(str(data)), (shard, 2), 0.02),
        coder_of(facts_of(str(tokenizer))),
        context=CONTEXT,
        batch=BATCH,
        seed=f"0/{shard}/2",
        start=Position(check=deltas[0][1].check),
    )
    drawn = made.batches()
    for tokens, position, _ in deltas:
        batches, rest = divmod(tokens, CONTEXT * BATCH)
        assert rest == 0
        assert len(list(islice(drawn, batches))) == batches
        assert made.position == position
    return len({incarnation for *_, incarnation in deltas})


def test_a_killed_client_goes_on_where_its_lease_says(site):
    """Kill -9 in the middle of a round: what no acknowledged delta has is trained again, once."""
    tokenizer = write_tokenizer(site.folder / "tokenizer")
    parquet = write_parquet(site.folder / "corpus", texts(4000))
    lines = write_lines(site.folder / "lines.jsonl", texts(4000))
    model = {f"model__{name}": size for name, size in
             (("layers", 1), ("width", 32), ("heads", 2), ("context", CONTEXT))}  # fmt: skip
    server = site.server(
        "--tokenizer", tokenizer, every_s=1.0, sync__clients=2, train__batch=BATCH, **model
    )
    keeper = client(site, "a", parquet, tokenizer)
    victim = client(site, "b", lines, tokenizer)
    site.wait_until(lambda: len(deltas_of(site, "b")) >= 3, "deltas of b")
    victim.kill()
    before = len(deltas_of(site, "b"))
    again = client(site, "b", lines, tokenizer)
    site.wait_until(lambda: len(deltas_of(site, "b")) >= before + 3, "deltas of b's second process")
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert keeper.end() == 0
    assert again.end() == 0
    assert "nats/token" in again.text
    assert "bits/byte" in again.text
    assert check_each_sample_once(site, "b", lines, tokenizer) == 2
    assert check_each_sample_once(site, "a", parquet, tokenizer) == 1
