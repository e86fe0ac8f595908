"""What a client says while it trains."""

import pytest

from fsl_async.node_client import progress_words


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            {"step": 1340, "tokens": 9, "tokens_per_s": 4000.4, "loss": 2.7133},
            "step 1,340, loss 2.71, 4,000 tokens/s",
        ),
        ({"step": 2, "tokens": 9, "tokens_per_s": 0.0}, "step 2"),
    ],
)
def test_progress_in_words(progress, words):
    """A task need not report a loss, and no speed is known in the first seconds; neither may cost the line."""
    assert progress_words(progress) == words
