"""What docs/site_hooks.py makes of the pages, and, where mkdocs is installed, the whole site."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("TUNING.md", "[x](../README.md#your-own-model)", "[x](readme.md#your-own-model)"),
        ("readme.md", "[x](docs/TUNING.md) [y](docs/adr)", "[x](TUNING.md) [y](adr/index.md)"),
        ("readme.md", "![x](docs/images/sync.png)", "![x](images/sync.png)"),
        ("adr/0055-preemption.md", "[x](../FAULTS.md)", "[x](../FAULTS.md)"),
        ("guides/versions.md", "[x](../../README.md)", "[x](../readme.md)"),
        ("SPLIT.md", "[x](../examples/own_task.py)", "[x](source/examples/own_task.py)"),
        ("SPLIT.md", "[x](https://a.org/b) [y](#z)", "[x](https://a.org/b) [y](#z)"),
        # What is not there, or outside of the repository, is left for the build to report.
        ("SPLIT.md", "[x](NOT.md) [y](../../../etc)", "[x](NOT.md) [y](../../../etc)"),
        ("SPLIT.md", "```\n[x](../README.md)\n```", "```\n[x](../README.md)\n```"),
    ],
)
def test_links_lead_to_the_page_of_the_file(hooks, page, text, expected):
    assert hooks.with_links(text, page) == expected


def test_what_belongs_to_an_item_is_indented_by_four(hooks):
    text = """1. one:

   ```
   x
   ```

   more
2. two

- a
  b
  - c

      code
"""
    expected = text.replace("\n   ", "\n    ").replace("\n  b\n  -", "\n    b\n    -")
    expected = expected.replace("\n       code", "\n        code")
    assert hooks.with_lists(text) == expected
    for other in ("text\n\n    code\n", "```\n- a\n  b\n```\n", "- a\n\ntext\n\n    code\n"):
        assert hooks.with_lists(other) == other


def test_arguments_of_a_docstring_become_a_list(hooks):
    text = "Join.\n\nserver: an address.\nname, rank: of it;\n    see there.\nRaises E.\n"
    assert hooks.as_markdown(text) == (
        "Join.\n\n- `server`: an address.\n- `name`, `rank`: of it;\n    see there.\n\nRaises E.\n"
    )
    prose = "Some text with\nname: in it.\n"
    assert hooks.as_markdown(prose) == prose


def test_a_page_that_is_not_complete_in_itself_is_reported(hooks, tmp_path):
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="https://x.org/y.css"><script src="//x.org/z.js"></script>'
        '<img srcset="https://x.org/1.png 1x, here.png 2x"><a href="b.html#here">b</a>'
        '<a href="b.html#gone">b</a><a href="c.html">c</a><a href="https://x.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<h2 id="here">x</h2>')
    (tmp_path / "s.css").write_text("a { background: url(https://x.org/p.png) } b { top: url(q) }")
    found = "\n".join(hooks.faults(tmp_path))
    for fault in (
        "a.html would load https://x.org/y.css",
        "a.html would load //x.org/z.js",
        "a.html would load https://x.org/1.png",
        "a.html links to here.png",
        "a.html links to b.html#gone",
        "a.html links to c.html",
        "s.css would load https://x.org/p.png",
    ):
        assert fault in found
    assert found.count("\n") == 6, found


def test_the_list_of_decisions_has_all_of_them(hooks):
    page = hooks.decisions(ROOT / "docs" / "adr")
    files = [file.name for file in (ROOT / "docs" / "adr").glob("0*.md")]
    assert sorted(re.findall(r"\]\((.+)\)", page)) == sorted(files)


def test_links_between_pages_work_on_a_plain_git_host(hooks):
    """The site's build checks its own links; these are the files' as they are."""
    pages = [ROOT / page for page in hooks.OUTSIDE] + sorted((ROOT / "docs").rglob("*.md"))
    for page in pages:
        for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_site_is_built(tmp_path):
    """CI builds it by bin/docs, which has an environment of its own for that."""
    found = shutil.which("mkdocs", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("mkdocs is not installed here: bin/docs builds the site")
    done = subprocess.run(
        [found, "build", "-q", "-f", ROOT / ".mkdocs.yml", "--site-dir", tmp_path / "site"],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "the parameter server's host:port or fsl:// address" in api
