"""`bin/netlab up|set|status|down`: a laboratory that stays until it is taken down.

For runs that are started by hand. Exit codes as everywhere (fsl_async.errors): 2 when the
laboratory cannot be had, with one line that names what is missing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click
from attrs import asdict

from fsl_async.errors import ExitCode, Report, UsageError, one_line, report
from netlab import profiles, records
from netlab.host import LabError, namespaces, require
from netlab.laboratory import Laboratory, remove, sweep

NAME = "lab"
_JSON = "--json"
_CONGESTION = "congestion="

_name = click.option(
    "--name", default=NAME, show_default=True, help="The laboratory, where there are several."
)


@click.group(epilog=f"Profiles: {', '.join(profiles.profiles())}. docs/netlab.md says more.")
def root() -> None:
    """Sites as network namespaces, and links with delay, loss, rate, duplicates, reordering.

    Needs root.
    """


@root.command()
@_name
@click.option(
    "--sites", default="server,client-1,client-2", show_default=True, metavar="A,B,...",
    help="The sites; by default the first one has a link with each of the others.",
)  # fmt: skip
@click.option(
    "--link", "pairs", multiple=True, metavar="A:B", help="These links instead; repeatable."
)
@click.option("--profile", default="lan", show_default=True, help="What all links do.")
def up(*, name: str, sites: str, pairs: tuple[str, ...], profile: str) -> int:
    """Make a laboratory; what a crashed one left is removed first."""
    wanted = [_pair(text) for text in pairs] or None
    lab = Laboratory(
        [site.strip() for site in sites.split(",")],
        profile=profile,
        pairs=wanted,
        name=name,
        lasting=True,
    )
    sweep(click.echo)
    lab.up()
    click.echo(f"{name} is up, links by {lab.backend}; run a command in a site with")
    for site in lab.sites:
        click.echo(f"    {_shown(lab, site)} COMMAND    # {lab.address(site)}")
    return 0


def _pair(text: str) -> tuple[str, str]:
    left, colon, right = text.partition(":")
    if not (left and colon and right):
        raise UsageError(f"--link {text[:80]}: write it as A:B")
    return left, right


def _shown(lab: Laboratory, site: str) -> str:
    ip, *rest = lab.command(site, [])
    return " ".join([os.path.basename(ip), *rest])  # noqa: PTH119 - a word, not a file


@root.command("set")
@_name
@click.argument("what")
@click.argument("words", nargs=-1, required=True)
def set_(*, name: str, what: str, words: tuple[str, ...]) -> int:
    """Change links while they are in use.

    WHAT is a link (server:client-1), a site with one link (client-1) or all. WORDS: cut, heal, a
    profile, or KEY=VALUE with delay, jitter, loss, burst, rate, up, down, duplicate, reorder, queue
    (delay=80ms loss=1% rate=10mbit). For a site also congestion=bbr.
    """
    lab = Laboratory.find(name)
    links = [word for word in words if not word.startswith(_CONGESTION)]
    for word in words:
        if word.startswith(_CONGESTION):
            for site in lab.sites if what == "all" else [what]:
                lab.set_congestion(site, word.removeprefix(_CONGESTION))
    if links:
        lab.set(what, *links)
    return 0


@root.command()
@_name
@click.option(_JSON, "as_json", is_flag=True, help="Print one JSON object.")
def status(*, name: str, as_json: bool) -> int:
    """Print the backend, the sites, the links with their settings and their present round trip."""
    lab = Laboratory.find(name)
    links: list[dict[str, Any]] = []
    for link, state in lab.links.items():
        measured = None if state.cut else lab.round_trip_ms(state.left, state.right)
        if measured == float("inf"):
            measured = None
        links.append({"link": link, **asdict(state), "round_trip_ms": measured})
    if as_json:
        found = {
            "name": name,
            "backend": lab.backend,
            "sites": {site: lab.address(site) for site in lab.sites},
            "congestion": dict(lab.congestion),
            "links": links,
        }
        click.echo(json.dumps(found))
        return 0
    click.echo(f"{name}: {len(lab.sites)} sites, links by {lab.backend}")
    for site in lab.sites:
        click.echo(
            f"  {site:16} {lab.address(site):12} {lab.congestion[site]:6} {_shown(lab, site)}"
        )
    for one in links:
        state = lab.links[one["link"]]
        what = f"{state.profile}: " if state.profile else ""
        took = one["round_trip_ms"]
        trip = "cut" if state.cut else "no answer" if took is None else f"{took:.1f} ms"
        click.echo(f"  {one['link']:24} {trip:>10}  {what}{profiles.words(state.settings)}")
    return 0


@root.command()
@_name
@click.option("--all", "everything", is_flag=True, help="All laboratories, of any user.")
def down(*, name: str, everything: bool) -> int:
    """End what runs in the sites and remove the laboratory, and what crashed ones left.

    Harmless when there is none.
    """
    require()
    for one in (everything and records.names()) or [name]:
        found = remove(one)
        click.echo(f"{one} is down" if found else f"there is no laboratory {one}")
    sweep(click.echo)
    left = [one for one in namespaces() if one.startswith(f"fsl-{name}-")]
    if left:
        raise LabError(f"these namespaces could not be removed: {', '.join(left)}")
    return 0


def _translate(error: BaseException) -> Report | None:
    if isinstance(error, click.ClickException):
        text = one_line(error.format_message()).removesuffix(".")
        message = f"{text[:1].lower()}{text[1:]} (see bin/netlab --help)"
        return Report(type(error).__name__, message, ExitCode.BAD_INPUT)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return int(
            root.main(args or ["--help"], prog_name="bin/netlab", standalone_mode=False) or 0
        )
    except BaseException as error:  # noqa: BLE001 - the top of the program
        return report(
            error,
            as_json=_JSON in args,
            debug=False,
            out=sys.stdout,
            err=sys.stderr,
            translate=_translate,
        )


if __name__ == "__main__":
    sys.exit(main())
