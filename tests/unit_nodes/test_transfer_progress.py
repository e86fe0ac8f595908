"""Peers whose transfers advance, for which the end of a run waits."""

from fsl_async.nodes.wire import TransferProgress
from fsl_transport import Transfer


def row(peer, done, stream="delta:1", *, sending=False):
    return Transfer(peer, stream, sending=sending, accepted=True, chunks=9, done=done)


def test_what_counts_as_progress():
    """A begin, a chunk or an end counts; a stream offered again without a chunk does not."""
    moves = TransferProgress()
    assert moves.look([]).advanced == ()
    assert moves.look([row("a", 1), row("b", 0)]).advanced == ("a", "b")
    assert moves.look([row("a", 2), row("b", 0)]).advanced == ("a",)
    assert moves.look([row("b", 0)]).advanced == ("a",)
    assert moves.look([row("b", 0)]).advanced == ()
    assert moves.look([row("b", 0, sending=True)]).advanced == ("b",)


def test_a_delta_that_is_being_stored_counts():
    """A stream may begin and end between two checks, and its delta not be on disk yet."""
    moves = TransferProgress()
    assert moves.look([row("b", 0)], ["a"]).advanced == ("a", "b")
    assert moves.look([row("b", 0)], ["a"]).advanced == ("a",)
    assert moves.look([row("b", 0)]).advanced == ()
