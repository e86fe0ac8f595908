"""Fits pages that are written for a git host into the docs site (.mkdocs.yml).

The pages stay as they are; what the site needs is made here, at the build:

- README.md, CONTRIBUTING.md and CHANGELOG.md are outside of docs/ and become pages of it.
- `docs/adr` is a link to a folder on a git host, and a list of decisions here.
- Files of the source that a page links to are copied.
- Lists are indented for Python-Markdown, which needs four columns where git hosts take two.
"""

from __future__ import annotations

import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md"}
OUTSIDE["CHANGELOG.md"] = "changelog.md"
"""Pages outside of docs/, by their path in the repository, and their path in the site."""
SOURCES = "source"
"""Folder of the site with copies of files that pages link to."""
DECISIONS = "adr/index.md"

_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")
_ITEM = re.compile(r"(?:[-*+]|\d+\.) +")


def site_path(repository_path: str) -> str:
    """Give the path in the site of a file or folder of the repository, docs/adr for example."""
    if repository_path in OUTSIDE:
        return OUTSIDE[repository_path]
    if repository_path == "docs/adr":
        return DECISIONS
    if repository_path.startswith("docs/"):
        return repository_path.removeprefix("docs/")
    return f"{SOURCES}/{repository_path}"


def repository_path(site: str) -> str:
    """Give the path in the repository of a page of the site."""
    for outside, page in OUTSIDE.items():
        if site == page:
            return outside
    return f"docs/{site}"


def with_links(text: str, page: str) -> str:
    """Rewrite links between files of the repository to links between pages of the site.

    page: the path in the site of the page with this text. Links to what does not exist stay as they
    are: the build reports them.
    """
    folder = posixpath.dirname(repository_path(page))

    def rewritten(found: re.Match[str]) -> str:
        head, target, anchor, tail = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        file = posixpath.normpath(posixpath.join(folder, target))
        if file.startswith("..") or not (ROOT / file).exists():
            return found[0]
        shown = posixpath.relpath(site_path(file), posixpath.dirname(page) or ".")
        return f"{head}{shown}{anchor or ''}{tail}"

    return _outside_fences(text, lambda line: _LINK.sub(rewritten, line))


def with_lists(text: str) -> str:
    """Indent what belongs to an item of a list by four columns, with what is nested in it."""
    lines: list[str] = []
    offset = 0  # columns of the marker of the item that is open, 0 without one
    fenced = False
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        marker = _ITEM.match(line)
        if not fenced and line and indent == 0:
            offset = len(marker[0]) if marker else 0
        if line.startswith("```"):
            fenced = not fenced
        moved = offset and 0 < offset <= indent and not fenced
        lines.append(" " * (4 - offset) + line if moved and offset < 4 else line)
    return "\n".join(lines)


def as_markdown(docstring: str) -> str:
    """Make a list of a docstring's arguments, which stand below each other: `name: what it is`."""
    lines: list[str] = []
    listed = False
    for line in docstring.split("\n"):
        argument = _ARGUMENT.match(line)
        if argument and (listed or not lines or not lines[-1]):
            names = ", ".join(f"`{name}`" for name in argument[1].split(", "))
            lines.append(f"- {names}: {argument[2]}")
            listed = True
            continue
        if listed and line and not line.startswith(" "):
            lines.append("")
            listed = False
        lines.append(line)
    return "\n".join(lines)


def decisions(folder: Path) -> str:
    """Write the page that lists the records of decisions, highest number first."""
    rows = []
    for file in sorted(folder.glob("0*.md"), reverse=True):
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}]({file.name})")
    return "\n".join(["# Decisions", "", "Why it is built so, by number.", "", *rows])


def linked_sources(pages: Iterable[tuple[str, str]]) -> set[str]:
    """Find the files of the source that pages link to. pages: path in the site, and text."""
    files = set()
    for page, text in pages:
        folder = posixpath.dirname(repository_path(page))
        for _, target, _, _ in _LINK.findall(text):
            file = posixpath.normpath(posixpath.join(folder, target))
            outside = not file.startswith(("docs/", "..")) and file not in OUTSIDE
            if outside and (ROOT / file).is_file():
                files.add(file)
    return files


def _outside_fences(text: str, change: Any) -> str:
    """Apply a change to each line that is not in a fenced block."""
    lines, fenced = [], False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        lines.append(line if fenced else change(line))
    return "\n".join(lines)


class _References(HTMLParser):
    """What a page loads, what it links to, and what can be linked to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        if tag == "a":
            self.anchors.add(found.get("name", ""))
            self.linked.append(found.get("href", ""))
        elif tag == "link":
            shown = found.get("rel") in {"canonical", "next", "prev"}
            (self.linked if shown else self.loaded).append(found.get("href", ""))
        else:
            self.loaded += [found[name] for name in ("src", "poster", "data") if name in found]
            if "srcset" in found:
                self.loaded += [one.split()[0] for one in found["srcset"].split(",")]


def faults(site: Path) -> list[str]:
    """Check the pages of a built site: what they load is in it, and links lead somewhere."""
    pages = {}
    for file in sorted(site.rglob("*.html")):
        parser = _References()
        parser.feed(file.read_text(encoding="utf-8"))
        pages[file.resolve()] = parser
    found = []
    for file, parser in pages.items():
        name = file.relative_to(site.resolve())
        found += [
            f"{name} would load {one} from another server"
            for one in parser.loaded
            if _is_elsewhere(one)
        ]
        for one in parser.loaded + parser.linked:
            path, _, anchor = one.partition("#")
            if not one or _is_elsewhere(one) or one.startswith(("mailto:", "data:")):
                continue
            # 404.html is served for any path, so its links begin at the top.
            start = site.resolve() if path.startswith("/") else file.parent
            target = (start / unquote(path).lstrip("/")).resolve() if path else file
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{name} links to {one}, which is not there")
            elif target in pages and unquote(anchor) not in pages[target].anchors:
                found.append(f"{name} links to {one}, where there is no such heading")
    for file in sorted(site.rglob("*.css")):
        text = file.read_text(encoding="utf-8")
        found += [
            f"{file.relative_to(site)} would load {one} from another server"
            for one in re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", text)
            if _is_elsewhere(one)
        ]
    return found


def _is_elsewhere(address: str) -> bool:
    return address.startswith(("http://", "https://", "//"))


# What mkdocs calls.


def on_config(config: Any) -> Any:
    """Let `site_docstrings` import this file."""
    sys.path.insert(0, str(Path(__file__).parent))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that are not below docs/."""
    from mkdocs.structure.files import File

    for outside, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / outside)))
    text = decisions(ROOT / "docs" / "adr")
    files.append(File.generated(config, DECISIONS, content=text))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    for source in sorted(linked_sources(pages)):
        shown = f"{SOURCES}/{source}"
        files.append(File.generated(config, shown, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fit the text of a page."""
    return with_lists(with_links(markdown, page.file.src_uri))


def on_post_build(config: Any) -> None:
    """End the build where a page of the site is not complete in itself."""
    found = faults(Path(config["site_dir"]))
    if found:
        from mkdocs.exceptions import Abort

        raise Abort("\n".join(found))
