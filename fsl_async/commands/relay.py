"""`fsl-node --role relay SERVER`: forward what clients and a server say to each other, unread."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fsl_async import address as addresses
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError
from fsl_async.program import program

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.effects import Note
    from fsl_async.node_relay import Door

DEFAULT_LISTEN = "tcp://127.0.0.1:7100"


def command(
    *,
    address: str | None,
    listen: str | None,
    also: tuple[str, ...],
    run_dir: Path | None,
    insecure: bool,
    dry_run: bool,
    as_json: bool,
    **of_others: Any,
) -> int:
    """Check the options, then run the relay; returns the exit code."""
    from fsl_async.stopper import Stopper, stop_on_signals

    for option, value in of_others.items():
        if value not in (None, (), False):
            flag = {"overrides": "set"}.get(option, option).replace("_", "-")
            raise UsageError(f"--{flag} is not a relay's, which forwards what it does not read")
    if address is None:
        raise UsageError(
            f"which server? Give the address in the line that it prints, like: {program()} --role relay --listen *:7100 {addresses.EXAMPLE}"
        )
    doors = doors_of(address, listen or DEFAULT_LISTEN, also, insecure=insecure)
    output = Output(as_json=as_json)
    if dry_run:
        output.result(
            {"role": "relay", "server": addresses.parse(address).fsl}
            | {"doors": [f"{one.listen} -> {one.server}" for one in doors]}
            | {"sealed": all(one.sealed for one in doors), "run_dir": str(run_dir or "")}
        )
        return 0
    from fsl_async.node_relay import serve

    def announce(bound: list[tuple[str, int]]) -> None:
        lines = [
            join_line(address, places[0], places[1]) if not number else ""
            for number, places in enumerate(bound)
        ]
        for (host, port), door, line in zip(bound, doors, lines, strict=True):
            place = addresses.Address(host, port).tcp
            output.record("listening", address=place, server=door.server, join=line)
            output.say(f"relay at {place} for {door.server}")
        output.say(f"on each client:\n    {lines[0]}")

    def tell(note: Note) -> None:
        if output.as_json:
            output.record("note", text=note.text, level=note.level, **note.facts)
        elif note.level == "warning":
            output.warn(note.text)
        else:
            output.say(note.text)

    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = serve(doors, run_dir=run_dir, announce=announce, tell=tell, stop=stopper)
    output.result(summary)
    return stopper.exit_code


def join_line(server: str, host: str, port: int) -> str:
    """What to paste at each client: the server's address with the relay's host and port in it. The key stays the server's own."""
    from attrs import evolve

    reach = addresses.reachable_host(host)
    place = evolve(addresses.parse(server), host=reach, port=port)
    return f"{program()} --role client --name SITE --data PATH {shlex.quote(place.fsl)}"


def doors_of(server: str, listen: str, also: tuple[str, ...], *, insecure: bool) -> list[Door]:
    """The doors: one for the parameter server, and one for each `--also LISTEN=ADDRESS`. Raises UsageError and AddressError."""
    from fsl_async.node_relay import Door

    main = addresses.parse_listen(listen)
    wanted = [(main, addresses.parse(server))]
    for text in also:
        left, equals, right = text.partition("=")
        if not equals:
            raise UsageError(
                f"--also {text}: write it as PORT=ADDRESS or HOST:PORT=ADDRESS, for example 7101=split.example.org:7101"
            )
        where = f"{main.tcp.rpartition(':')[0]}:{left}" if left.isdecimal() else left
        wanted.append((addresses.parse_listen(where), addresses.parse(right)))
    doors = []
    for place, target in wanted:
        sealed = bool(target.key)
        if not (sealed or insecure or (place.is_loopback and target.is_loopback)):
            raise UsageError(
                f"{target.fsl} has no key: everything would pass unencrypted, readable here and on the way; give the address with ?key=... "
                "as the server prints it, or accept it with --insecure"
            )
        doors.append(Door(place.tcp, target.tcp, sealed))
    return doors
