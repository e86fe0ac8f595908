"""What a client says while it trains."""

import pytest
import torch

from fsl_async.joining import _start_line
from fsl_async.learn.fed import Place
from fsl_async.node_client import progress_words
from fsl_async.threads import cores


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            {"step": 1340, "tokens": 9, "tokens_per_s": 4000.4, "loss": 2.7133},
            "step 1,340, loss 2.71 (running mean), 4,000 tokens/s",
        ),
        ({"step": 2, "tokens": 9, "tokens_per_s": 0.0}, "step 2"),
    ],
)
def test_progress_in_words(progress, words):
    """A task need not report a loss, and no speed is known in the first seconds; neither may cost the line."""
    assert progress_words(progress) == words


@pytest.mark.parametrize(
    "case",
    [
        (0, None, None, cores(), "give each client --threads N"),
        (0, None, "3", 3, "OMP_NUM_THREADS"),
        (2, None, "3", 2, "the run's train.threads"),
        (2, 1, "3", 1, "--threads"),
    ],
)
def test_the_start_line_tells_the_threads_and_sets_them(case, monkeypatch):
    """Two clients that take all cores each wait for each other: the line must say what is so, and where to change it."""
    setting, option, variable, count, why = case
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = {"train": {"threads": setting if option is None else option}}
    before = torch.get_num_threads()
    try:
        line = _start_line(Place("site-a", config=config), option)
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert line.startswith(f"site-a trains on cpu with {count} thread")
    assert why in line
