"""What sites of tuned runs have."""

import pytest


@pytest.fixture
def base(tmp_path):
    """The folder of a tiny base model."""
    from tiny_base import write_llama

    return write_llama(tmp_path / "base")
