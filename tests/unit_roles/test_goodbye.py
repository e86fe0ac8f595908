"""The reason of a client's goodbye: written and read, also from an unauthenticated peer."""

import pytest

from fsl_async.roles.goodbye import Goodbye


@pytest.mark.parametrize(
    ("goodbye", "text"),
    [
        (Goodbye("Ctrl-C"), "Ctrl-C"),
        (Goodbye("SIGTERM", 0.0), "relaunch 0: SIGTERM"),
        (Goodbye("training hangs: no step", 1.2), "relaunch 2: training hangs: no step"),
        (Goodbye("late", -3.0), "relaunch 0: late"),
        (Goodbye("slow", 1e9), "relaunch 9999: slow"),
    ],
)
def test_a_goodbye_is_read_back(goodbye, text):
    """Seconds are rounded up, because an earlier launch is useless."""
    assert goodbye.text == text
    read = Goodbye.read(text)
    assert read.text == text
    assert read.reason == goodbye.reason
    assert (read.relaunch_in_s is None) == (goodbye.relaunch_in_s is None)


@pytest.mark.parametrize(
    "text",
    ["", "relaunch", "relaunch : x", "relaunch 99999: x", "relaunch -1: x", "relaunch 1e3: x",
     "relaunch ٣: x", "Relaunch 1: x", " relaunch 1: x", "relaunch 1:x", "superseded"],
)  # fmt: skip
def test_any_other_text_is_a_sentence(text):
    """Only a short number of ASCII digits is accepted from a peer."""
    assert Goodbye.read(text) == Goodbye(text)


def test_a_reason_is_short_and_printable():
    """It is shown in terminals and kept in a journal: no escapes, one line, limited length."""
    assert Goodbye.read("relaunch 7: a\x1b[2J\nb") == Goodbye(r"a\u001b[2J\u000ab", 7.0)
    assert (
        len(Goodbye.read("x" * 1024).reason)
        == len(Goodbye.read("relaunch 1: " + "y" * 999).reason)
        == 200
    )
