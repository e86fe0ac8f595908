"""Windows of packed texts: each token once, from any position on as without a stop."""

from itertools import islice

import numpy as np
import pytest
from token_texts import texts, write_tokenizer

from fsl_async.errors import DataError
from fsl_async.learn.data import packing
from fsl_async.learn.data.packing import Packer, Position, held_out_tokens
from fsl_async.learn.data.sources import Piece
from fsl_async.learn.data.tokenizer import Bytes, coder_of, facts_of

pytest.importorskip("tokenizers", reason="the extra hf is not installed")


class Texts:
    """A source in memory, whose pieces have a state as a stream's do."""

    name, fingerprint = "texts", "0" * 32

    def __init__(self, rows, kept=()):
        self.rows, self.kept, self.begun = rows, kept, []

    def read(self, epoch, at, resume=None):
        """Rows from a position, or from a state."""
        self.begun.append((epoch, at, resume))
        for row in range(at if resume is None else resume, len(self.rows)):
            yield Piece(self.rows[row], row, resume=row)

    def held_out(self):
        """What is kept back."""
        yield from self.kept


@pytest.fixture
def coder(tmp_path):
    return coder_of(facts_of(str(write_tokenizer(tmp_path / "words"))))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_WINDOWS", 10)


def packer(rows, coder, **more):
    return Packer(Texts(rows), coder, **{"context": 8, "batch": 3, "seed": "s"} | more)


def first(made, count):
    return list(islice(made.batches(), count))


@pytest.mark.usefixtures("small_blocks")
def test_each_token_of_an_epoch_is_predicted_once(coder):
    """Windows share one token with the next: as inputs they are all tokens, in another order."""
    rows = texts(120)
    flat = np.concatenate([np.append(one, coder.end) for one in coder.encode(rows)])
    made = packer(rows, coder, batch=1)
    windows = len(flat) // 80 * 10
    drawn = first(made, windows)
    found = np.concatenate([batch[0, :-1] for batch in drawn])
    targets = np.concatenate([batch[0, 1:] for batch in drawn])
    assert sorted(found) == sorted(flat[: windows * 8])
    assert sorted(targets) == sorted(flat[1 : windows * 8 + 1])
    assert not np.array_equal(found, flat[: windows * 8]), "a batch is not one text"
    assert packer(rows, coder).position == Position()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 10, 29, 100])
def test_from_any_position_on_it_is_as_without_a_stop(coder, stop, has_state):
    """Over blocks, texts and epochs; 30 texts are some 400 tokens."""
    rows = texts(30)
    whole = first(packer(rows, coder), stop + 12)
    before = packer(rows, coder)
    first(before, stop)
    again = packer(rows, coder, start=before.position, resume=before.resume if has_state else None)
    for one, other in zip(whole[stop:], first(again, 12), strict=True):
        np.testing.assert_array_equal(one, other)
    state = before.position.at if has_state and before.position.at else None
    assert again._source.begun[0] == (before.position.epoch, before.position.at, state)
    facts = before.position.to_facts()
    assert Position.from_facts(facts) == before.position
    assert Position.from_facts({}) is None


@pytest.mark.usefixtures("small_blocks")
def test_ranks_share_the_windows_and_have_one_position(coder):
    """So the position of one rank is that of all."""
    rows = texts(40)
    ranks = [packer(rows, coder, share=(rank, 2)) for rank in range(2)]
    drawn = [first(one, 5) for one in ranks]
    alone = packer(rows, coder, batch=6)
    for step, batch in enumerate(first(alone, 5)):
        np.testing.assert_array_equal(batch[0::2], drawn[0][step])
        np.testing.assert_array_equal(batch[1::2], drawn[1][step])
    assert ranks[0].position == ranks[1].position == alone.position


def test_a_source_without_text_is_an_error(coder):
    """Not an endless loop."""
    for rows in ([], ["", ""]):
        with pytest.raises(DataError, match="no text in the part of this client"):
            first(packer(rows, coder), 1)


def test_held_out_texts_are_the_same_whatever_the_tokenizer(coder):
    """Bits per byte are over the same bytes; each text begins after an end."""
    kept = ["alpha beta", "gamma ü", "delta"]
    for one in (coder, Bytes()):
        tokens, size = held_out_tokens(Texts([], kept), one, 17)
        assert size == len("alpha beta" + "gamma ")
        assert tokens[0] == tokens[-1] == one.end
    with pytest.raises(DataError, match="no text is held out"):
        held_out_tokens(Texts([]), coder, 17)
