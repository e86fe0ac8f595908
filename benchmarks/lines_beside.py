"""Lines of code of published first examples: ours, Flower's, NVIDIA FLARE's, torchft's, hivemind's.

    python benchmarks/lines_beside.py CHECKOUTS      # a folder with git clones, any of PROJECTS

A line counts if it is not blank, no comment and no part of a docstring. "joint" are the lines of
statements that name something of the framework, or something that exists only for it (the patterns
below): what training alone would not need. Prints a JSON row for each example. docs/guides/
beside-others.md has the rule for commands and what the figures mean.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALL = r""

FLOWER = (
    r"flwr|ClientApp|ServerApp|app\.|\bmsg\b|context|Record|Message|strategy|\bgrid|fds\b|partition"
)
FLARE = r"flare\.|import nvflare|from nvflare|FLModel|input_model|output_model|last_params"
TORCHFT = (
    r"torchft|anager|REPLICA_GROUP|ProcessGroup|PGTransport|HTTPTransport|state_dict|\bpg\b"
    r"|DistributedDataParallel|DistributedSampler|transport\b|outer_optimizer|DiLoCo|diloco"
)
HIVEMIND = r"hivemind|dht"
OURS = r"fsl_async|\bfed\b|scheduler"

PROJECTS = {
    "fsl-async": ("", {"script": ("", {"examples/own_script.py": OURS})}),
    "flower": (
        "fdef7afb1dca3030553be302366cfd285ed6632c",
        {
            "quickstart-pytorch": (
                "examples/quickstart-pytorch/",
                {
                    "pytorchexample/client_app.py": FLOWER,
                    "pytorchexample/server_app.py": FLOWER,
                    "pytorchexample/task.py": FLOWER,
                    "pyproject.toml": "tool.flwr",
                },
            )
        },
    ),
    "NVFlare": (
        "f3b7c1bffdfed90338d695a67b52a46d8bc4d28c",
        {
            "hello-pt": (
                "examples/hello-world/hello-pt/",
                {"client.py": FLARE, "job.py": ALL, "model.py": FLARE},
            ),
            # Its shortest form: "requires just 3 changes".
            "quickstart page": ("docs/", {"quickstart.rst": ALL}),
        },
    ),
    "torchft": (
        "73dafea422116b2a713542719c8454efe5444c6c",
        {
            "train_ddp": ("", {"train_ddp.py": TORCHFT}),
            "train_diloco": ("", {"train_diloco.py": TORCHFT}),
            "readme": ("", {"README.md": TORCHFT}),
        },
    ),
    "hivemind": (
        "4bd43b77895019b20d18d81d0d0c1a5ab9a10847",
        {"quickstart": ("docs/user/", {"quickstart.md": HIVEMIND})},
    ),
}


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that are not blank, no comment and no part of a docstring."""
    skipped = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER, tokenize.ENCODING,
    }  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            first = body[0]
            if isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def joint_lines(source: str, pattern: str) -> set[int]:
    """Lines of statements that match. Of one with a body: its head, and a body of one line."""
    counted, text = code_lines(source), source.splitlines()
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno
        lines = set(range(first, max(first, last or first) + 1)) & counted
        if any(re.search(pattern, text[line - 1].partition("#")[0]) for line in lines):
            found |= lines
            if isinstance(node, ast.If) and len(node.body) == 1:
                found |= set(range(first, (node.body[0].end_lineno or first) + 1)) & counted
    return found


def count_toml(text: str, table: str) -> tuple[int, int]:
    """All lines, and those of the tables whose names begin with `table`."""
    tomllib.loads(text)
    total = joint = 0
    inside = False
    for line in text.splitlines():
        if line.startswith("["):
            inside = line.strip("[]").startswith(table)
        if line.strip() and not line.lstrip().startswith("#"):
            total += 1
            joint += inside
    return total, joint


def python_of(name: str, text: str) -> str:
    """The file; of a page its Python blocks that stand for one script."""
    if name.endswith(".rst"):
        blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", text)
        return "\n".join(re.sub(r"(?m)^    ", "", block) for block in blocks)
    if name.endswith(".md"):
        blocks = re.findall(r"```py(?:thon)?\n(.*?)```", text, re.DOTALL)
        return str(max(blocks[:2], key=len) if name == "quickstart.md" else blocks[0])
    return text


def counts(name: str, text: str, pattern: str) -> tuple[int, int]:
    """All lines of code of a file, and those for training together."""
    if name.endswith(".toml"):
        return count_toml(text, pattern)
    source = python_of(name, text)
    return len(code_lines(source)), len(joint_lines(source, pattern))


def main() -> int:
    """Print a row for each example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", type=Path)
    folder = parser.parse_args().checkouts
    for project, (commit, examples) in PROJECTS.items():
        for example, (prefix, files) in examples.items():
            total = joint = 0
            for name, pattern in files.items():
                if commit:
                    command = ["git", "-C", folder / project, "show", f"{commit}:{prefix}{name}"]
                    text = subprocess.run(command, capture_output=True, text=True, check=True)
                    found = counts(name, text.stdout, pattern)
                else:
                    found = counts(name, (ROOT / prefix / name).read_text(), pattern)
                total, joint = total + found[0], joint + found[1]
            row = {"project": project, "commit": commit[:12], "example": example}
            print(json.dumps({**row, "files": len(files), "lines": total, "joint": joint}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
