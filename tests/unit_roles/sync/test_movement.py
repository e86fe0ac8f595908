"""Steps that change no weight: when a client says so, and what such a delta weighs."""

from configs import book_of

from fsl_async.roles.sync.delta import Delta, DeltaKey, StoredDelta
from fsl_async.roles.sync.training_trouble import Movement
from fsl_async.roles.sync.weighting import TokensWeighting


def test_two_rounds_without_a_change_are_one_line():
    """An optimizer of another model trains for days; one round may be a loss scale's search."""
    movement = Movement()
    assert movement.saw(20, moved=False) == []
    (note,) = movement.saw(30, moved=False)
    assert note.level == "warning"
    assert note.text.startswith("50 steps in 2 rounds changed no exchanged weight")
    for cause in ("optimizer", "GradScaler", "scaler.get_scale()", "gradients", "learning rate"):
        assert cause in note.text
    assert movement.saw(30, moved=False) == []
    assert len(movement.saw(1, moved=True)) == 1
    assert movement.saw(1, moved=True) == []


def average(norms, **options):
    """The factors of deltas of 512 tokens in the average."""
    book = book_of(TokensWeighting(), max_staleness=4, keep_versions=3, **options)
    book.version = 0
    for number, norm in enumerate(norms):
        delta = Delta(DeltaKey(f"client-{number}", 1, 0, 1), "", 512, 20)
        book.acknowledge(StoredDelta(delta, 1, norm))
    merged, scale = book.begin_merge()
    return [one.weight * scale for one in merged]


def test_a_change_between_two_rounds_is_none_in_a_row():
    """A loss scale that is too high now and then is healthy."""
    movement = Movement()
    for _ in range(3):
        assert movement.saw(5, moved=False) == []
        assert movement.saw(5, moved=True) == []


def test_a_round_in_which_nothing_moves_makes_a_version():
    """At a learning rate of 0 the run goes on, and nothing is divided by 0."""
    assert average([0.0, 0.0]) == [0.0, 0.0]
