"""How many small faults in given files the tests detect.

    python benchmarks/mutants.py --count 20 fsl_async/store/rules/outer.py
    python benchmarks/mutants.py --count 300 --tests "pytest -q -x tests/unit_store" fsl_async/store
    python benchmarks/mutants.py --reached --tests "pytest -q tests/unit_roles" fsl_async/roles

A mutant is one file with one change in a function: a comparison is inverted, a number is one larger
or smaller, `and` becomes `or`, None is returned, or a statement is dropped. --count of all mutants
are chosen by --seed. Each runs --tests, a pytest command, in a copy of the working tree. It is
killed when the command fails, and timed out after three times what the command takes otherwise.

--reached runs the tests once with the package `coverage` (pip install coverage), and each mutant
then has only the tests that reach its lines; one that no test reaches has survived. Tests in other
processes, and what a module does when it is imported, are not seen.

Prints one JSON row. Some survivors behave as the original does: compare two sets of tests by their
survivors with one seed, not by a share.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot))
INVERSE: dict[type, type] = dict((*PAIRS, (ast.In, ast.NotIn), (ast.And, ast.Or)))
INVERSE |= {after: before for before, after in INVERSE.items()}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# An installed checkout finds its packages by a hook, also from within a copy of it.
PLUGIN = """import coverage, pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    coverage.Coverage.current().switch_context(item.nodeid.partition("[")[0])
    return (yield)
"""
UNHOOK = """import sys
sys.meta_path[:] = [one for one in sys.meta_path if "ScikitBuild" not in type(one).__name__]
"""


def changes(node: ast.AST) -> Iterator[str]:
    """Return what may stand in the source instead of a node."""
    match node:
        case ast.Compare(left, [first, *others], right):
            yield f"({ast.unparse(ast.Compare(left, [INVERSE[type(first)](), *others], right))})"
        case ast.BoolOp(operator, values):
            yield f"({ast.unparse(ast.BoolOp(INVERSE[type(operator)](), values))})"
        case ast.Constant(value) if type(value) in (int, float):
            yield from (f"({value!r} {sign} 1)" for sign in "+-")
        case ast.Return(value) if value is not None:
            yield "return None"
        case ast.Expr(ast.Constant()):  # a docstring
            return
        case _ if isinstance(node, DROPPED):
            yield "pass"


def mutants(path: Path) -> dict[tuple[Path, int, int, str], str]:
    """Map the mutants of a file (file, first and last byte, text instead) to descriptions."""
    source = path.read_bytes()
    tree, lines = ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    # Positions within f-strings are wrong before Python 3.12.
    texts = [one for one in ast.walk(tree) if isinstance(one, ast.JoinedStr)]
    skipped = {inner for one in texts for inner in ast.walk(one)}
    functions = [one for one in ast.walk(tree) if isinstance(one, FUNCTIONS)]
    found = {}
    for statement in (one for function in functions for one in function.body):
        nodes: list[Any] = [one for one in ast.walk(statement) if one not in skipped]
        for one, after in [(node, after) for node in nodes for after in changes(node)]:
            start = lines[one.lineno - 1] + one.col_offset
            end = lines[one.end_lineno - 1] + one.end_col_offset
            text = f"{path.relative_to(ROOT)}:{one.lineno}: {source[start:end].decode()} -> {after}"
            found[path, start, end, after] = " ".join(text.split())
    return found


def copy_tree(folder: Path) -> None:
    """Copy the files that git tracks or would add, and the built codec."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    with contextlib.suppress(ImportError):
        from fsl_codecs import _native  # type: ignore[attr-defined]

        shutil.copy2(_native.__file__, folder / "codecs/fsl_codecs")
    (folder / "sitecustomize.py").write_text(UNHOOK)


def tests_of_lines(folder: Path, words: list[str]) -> dict[str, dict[int, list[str]]]:
    """Run the tests in a copy; map each file's lines to the tests that reach them."""
    (folder / "reached.py").write_text(PLUGIN)
    run = ["coverage", "run", "--source=fsl_async", "-m", *words, "-p", "reached"]
    if verdict(folder, run, None) != "survived":
        sys.exit(f"The tests fail without a mutant:\n{(folder / 'output.txt').read_text()}")
    data = __import__("coverage").CoverageData(str(folder / ".coverage"))
    data.read()
    return {
        str(Path(file).relative_to(folder.resolve())): {
            line: sorted({one for one in tests if one})
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


def verdict(folder: Path, words: list[str], limit_s: float | None) -> str:
    """Run the tests in a copy and return "killed", "survived" or "timed_out"."""
    places = [str(folder / one) for one in (".", "codecs", "transport")]
    # `coverage` may be in a folder of its own.
    places += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-m", *words]
    with (folder / "output.txt").open("wb") as output:
        how: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
        running = subprocess.Popen(command, cwd=folder, env=environment, **how)
        try:
            return "killed" if running.wait(limit_s) else "survived"
        except subprocess.TimeoutExpired:
            return "timed_out"
        finally:  # and the processes that a test left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def main() -> None:
    """Print the row."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="Python files, or folders of them")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", default="pytest -q -x tests/unit_store")
    parser.add_argument("--reached", action="store_true", help="only tests that reach the line")
    options = parser.parse_args()
    everything: dict[tuple[Path, int, int, str], str] = {}
    for path in options.paths:
        for file in sorted(path.resolve().rglob("*.py")) or [path.resolve()]:
            everything |= mutants(file)
    count = min(options.count, len(everything))
    chosen = random.Random(options.seed).sample(sorted(everything.items()), count)
    words, survivors = shlex.split(options.tests), []
    counts = dict.fromkeys(("killed", "survived", "timed_out"), 0)
    with tempfile.TemporaryDirectory() as temporary:
        copy_tree(folder := Path(temporary))
        begun, reached = time.monotonic(), {}
        if options.reached:
            reached = tests_of_lines(folder, words)
        elif verdict(folder, words, None) != "survived":
            sys.exit(f"The tests fail without a mutant:\n{(folder / 'output.txt').read_text()}")
        limit_s = 10 + 3 * (time.monotonic() - begun)
        for number, ((path, start, end, after), text) in enumerate(chosen, 1):
            file, source = folder / (name := path.relative_to(ROOT)), path.read_bytes()
            run = words
            if options.reached:
                first = source[:start].count(b"\n") + 1
                lines = range(first, first + source[start:end].count(b"\n") + 1)
                tests = {one for line in lines for one in reached[str(name)].get(line, ())}
                run = ["pytest", "-q", "-x", *sorted(tests)]
            file.write_bytes(source[:start] + after.encode() + source[end:])
            os.utime(file, (number, number))  # equal sizes and times would share their bytecode
            how = verdict(folder, run, limit_s) if run[3:] or not options.reached else "survived"
            counts[how] += 1
            survivors += [text] * (how == "survived")
            file.write_bytes(source)
            print(f"{number} of {count}: {how} {text}"[:100], file=sys.stderr)
    row = {"paths": [str(one) for one in options.paths], "seed": options.seed}
    print(json.dumps(row | {"of": len(everything)} | counts | {"survivors": survivors}))


if __name__ == "__main__":
    main()
