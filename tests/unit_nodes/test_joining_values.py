"""What a script gives to `fsl_async.join` is checked before anything is dialed."""

import pytest

import fsl_async
from fsl_async.errors import FslError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"server": None}, "server= takes text, and got NoneType"),
        ({"name": 5}, "name= takes text, and got int"),
        ({"run_dir": 5}, "run_dir= takes a path, and got int"),
        ({"keys": b"k"}, "keys= takes a path, and got bytes"),
        ({"log": "x"}, "log= takes a function that takes a line, and got str"),
        ({"allow": 5}, "allow= takes a list of kinds of data, and got int"),
        ({"layers": [0, 1]}, "layers= takes text, and got list"),
        ({"order": "second"}, "order='second': first or zeroth"),
        ({"rank": 2.5}, "rank is 2.5: give a whole number"),
        ({"rank": -1}, "rank is -1: give a whole number"),
    ],
)
def test_arguments_of_another_kind_are_refused(given, words):
    """They would be a traceback from deep inside, or travel to the parameter server."""
    with pytest.raises(FslError, match=words) as caught:
        fsl_async.join(**{"server": "127.0.0.1:9", **given})
    assert caught.value.message.startswith("fsl_async.join: ")
