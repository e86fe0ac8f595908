"""Output: objects for programs, lines for people, and no crash from a closed pipe."""

import ast
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import fsl_async
from fsl_async.commands.output import Output
from fsl_async.roles.phrasing import megabytes


@attrs.frozen
class Result:
    """One field of each kind."""

    name: str
    tokens_total: int
    loss: float | None
    ok: bool
    parts: list[int]


def test_plain_results_are_aligned_lines():
    """People read the summary, so numbers must be grouped and names aligned."""
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
def test_a_character_that_cannot_be_encoded_is_escaped(coding, shown):
    """With a path that is not UTF-8 `status` once stopped printing, with exit code 0."""
    raw = io.BytesIO()
    output = Output(out=io.TextIOWrapper(raw, encoding=coding))
    output.say("r\udcff ▁")
    output.say("more")
    assert raw.getvalue().decode(coding).splitlines() == [shown, "more"]


def test_values_that_json_lacks_become_null():
    """A diverged loss is NaN, which strict JSON readers refuse."""

    def strictly(word):
        raise AssertionError(word)

    out = io.StringIO()
    Output(as_json=True, out=out).result({"loss": math.nan, "more": [{"a": (1.5, -math.inf)}]})
    assert json.loads(out.getvalue(), parse_constant=strictly) == {
        "loss": None,
        "more": [{"a": [1.5, None]}],
    }


def test_a_run_that_never_began_has_no_version():
    """Programs get -1; people must see a dash, because -1 looks like a defect."""
    out, plain = io.StringIO(), io.StringIO()
    Output(out=plain).result({"version": -1})
    Output(out=out, as_json=True).result({"version": -1})
    assert (plain.getvalue(), out.getvalue()) == ("version  -\n", '{"version": -1}\n')


def test_byte_counters_are_a_table():
    """People must get a table instead of nested JSON at the end of a run."""
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
    """With --json a program must be able to parse every line of standard output."""
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
    plain = io.StringIO()
    Output(out=plain).record("round", number=3)
    assert plain.getvalue() == "", "a plain terminal must not show JSON"


def test_a_lost_terminal_does_not_end_a_node():
    """A server with its output in `| head -1` must continue."""
    script = (
        "import sys; from fsl_async.commands.output import Output; o = Output(); "
        "[o.say('x' * 1000) for _ in range(500)]; print('alive', file=sys.stderr)"
    )
    command = f'"{sys.executable}" -c "{script}" | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == "alive\n"


def test_a_broken_stream_without_a_descriptor_is_dropped():
    """A stream may be replaced by an object without a file descriptor."""

    class Broken(io.StringIO):
        """A pipe without a reader."""

        def write(self, text):
            """Fail like the system."""
            raise BrokenPipeError(32, "Broken pipe")

    output = Output(out=Broken(), err=Broken())
    output.say("x")
    output.warn("x")
    output.result({"a": 1})


def test_sizes_have_one_unit():
    """`plan` printed MiB and `status` MB for the same bytes; people compare them."""
    package = Path(fsl_async.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        source = path.read_text()
        if not re.search("[KMGT]iB", source):
            continue  # most files, which need not be parsed
        tree = ast.parse(source)
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(text, str) and id(node) not in prose and re.search("[KMGT]iB", text):
                found.add(str(path.relative_to(package)))
    # The figures of FSL-SAGE are in GiB.
    assert found == {"plan/report.py"}
    sizes = (megabytes(size) for size in (500, 2_500_000, 12.345e9, 4567e9))
    assert list(sizes) == ["0.5 kB", "2.5 MB", "12.35 GB", "4.57 TB"]


def test_sizes_of_a_result_have_their_unit(capsys):
    """A client ended with `memory grown  209,838,080`."""
    sizes = (megabytes(size) for size in (500, 2_500_000, 12.345e9, 4567e9))
    assert list(sizes) == ["0.5 kB", "2.5 MB", "12.35 GB", "4.57 TB"]
    Output().result({"memory_grown": 209_838_080, "free_bytes": 1500, "tokens": 1500})
    shown = [line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(one) for one in shown] == ["grown 209.8 MB", "bytes 1.5 kB", "1,500"]
