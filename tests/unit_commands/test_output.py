"""Printing: objects for programs, lines for people, and never a death by a closed pipe."""

import io
import json
import math
import subprocess
import sys

import attrs
import pytest

from fsl_async.commands.output import Output


@attrs.frozen
class Result:
    """One field of each kind."""

    name: str
    tokens_total: int
    loss: float | None
    ok: bool
    parts: list[int]


def test_plain_results_are_aligned_lines():
    """People read the summary, so numbers are grouped and names aligned."""
    out = io.StringIO()
    Output(out=out).result(Result("a", 1234567, 2.123456, ok=True, parts=[1, 2]))
    assert out.getvalue().splitlines() == [
        "name          a",
        "tokens total  1,234,567",
        "loss          2.123",
        "ok            yes",
        "parts         [1, 2]",
    ]


@pytest.mark.parametrize(
    ("coding", "shown"), [("ascii", r"r\udcff \u2581"), ("utf-8", r"r\udcff ▁")]
)
def test_what_the_terminal_has_no_character_for_silences_nothing(coding, shown):
    """`status` of a folder whose name is no UTF-8, or on a terminal of another coding, said three lines and then nothing, with exit code 0."""
    raw = io.BytesIO()
    output = Output(out=io.TextIOWrapper(raw, encoding=coding))
    output.say("r\udcff ▁")
    output.say("more")
    assert raw.getvalue().decode(coding).splitlines() == [shown, "more"]


def test_what_json_has_no_word_for_is_null():
    """A loss that diverged: NaN is no JSON, and whoever reads strictly stops at it."""

    def strictly(word):
        raise AssertionError(word)

    out = io.StringIO()
    Output(as_json=True, out=out).result({"loss": math.nan, "more": [{"a": (1.5, -math.inf)}]})
    assert json.loads(out.getvalue(), parse_constant=strictly) == {
        "loss": None,
        "more": [{"a": [1.5, None]}],
    }


def test_a_run_that_never_began_has_no_version():
    """-1 is how programs are told; people would read a defect in it."""
    out, plain = io.StringIO(), io.StringIO()
    Output(out=plain).result({"version": -1})
    Output(out=out, as_json=True).result({"version": -1})
    assert (plain.getvalue(), out.getvalue()) == ("version  -\n", '{"version": -1}\n')


def test_what_a_node_has_sent_is_a_table():
    """Nobody reads nested JSON at the end of a run."""
    traffic = {
        "payload": {"activations up": 1000},
        "coded": {"activations up": 550},
        "sockets": {"up": 600},
        "error": {"activations up": 0.01},
    }
    out = io.StringIO()
    Output(out=out).result({"run": "r", "traffic": traffic, "ps": {"version": -1}})
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["run", "r"],
        ["bytes", "of", "the", "node", "payload", "coded", "coding", "error"],
        ["activations", "up", "1,000", "550", "1.00%"],
        ["sockets", "up", "600"],
        ["sockets", "down", "0"],
        [],
        ["parameter", "server:"],
        ["version", "-"],
    ]


def test_json_keeps_standard_output_for_objects():
    """With --json a program may parse every line of standard output."""
    out, err = io.StringIO(), io.StringIO()
    output = Output(as_json=True, out=out, err=err)
    output.say("hello")
    output.warn("careful")
    output.record("round", number=3)
    output.result(Result("a", 1, None, ok=False, parts=[]))
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "round", "number": 3},
        {"name": "a", "tokens_total": 1, "loss": None, "ok": False, "parts": []},
    ]
    assert err.getvalue() == "hello\nwarning: careful\n"


def test_records_are_for_programs_only():
    """A plain terminal must not show JSON."""
    out = io.StringIO()
    Output(out=out).record("round", number=3)
    assert out.getvalue() == ""


def test_a_lost_terminal_does_not_end_a_node():
    """A server whose output goes to `| head -1` must go on serving."""
    script = (
        "import sys; from fsl_async.commands.output import Output; o = Output(); "
        "[o.say('x' * 1000) for _ in range(500)]; print('alive', file=sys.stderr)"
    )
    command = f'"{sys.executable}" -c "{script}" | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == "alive\n"


def test_a_broken_stream_is_dropped_also_without_a_file_behind_it():
    """Output may be replaced by anything, also by what has no file number."""

    class Broken(io.StringIO):
        """A pipe that nobody reads."""

        def write(self, text):
            """Fail as the system does."""
            raise BrokenPipeError(32, "Broken pipe")

    output = Output(out=Broken(), err=Broken())
    output.say("x")
    output.warn("x")
    output.result({"a": 1})
