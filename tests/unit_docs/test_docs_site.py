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
