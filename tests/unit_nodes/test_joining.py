"""What a script of one's own may choose when it joins."""

import pytest

import fsl_async
from fsl_async.errors import TaskError
from fsl_async.nodes.client import joining


def test_a_script_chooses_how_its_site_tunes(monkeypatch):
    """As --rank, --order and --layers do."""
    seen = []

    def runtime(options, **_):
        seen.append(options)
        raise TaskError("not here")

    monkeypatch.setattr(joining, "ClientRuntime", runtime)
    with pytest.raises(TaskError, match="not here"):
        fsl_async.join("127.0.0.1:9", name="a", rank=4, order="zeroth", layers="0-2")
    with pytest.raises(TaskError, match="not here"):
        fsl_async.join("127.0.0.1:9", name="a")
    assert [(one.rank, one.order, one.layers) for one in seen] == [
        (4, "zeroth", "0-2"),
        (0, None, ""),
    ]
