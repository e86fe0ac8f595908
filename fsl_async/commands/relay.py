"""`fsl-node --role relay SERVER`: forward what clients and a server say to each other, unread."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fsl_async.commands.output import Output
from fsl_async.config import address as addresses
from fsl_async.errors import UsageError
from fsl_async.process.program import program
from fsl_async.process.scheduling import run_in_batches

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.nodes.relay.node import Door
    from fsl_async.roles.machine import Note

DEFAULT_LISTEN = "tcp://127.0.0.1:7100"


def command(
    *,
    address: str | None,
    listen: str | None,
    split: str | None,
    memory_mib: int | None,
    run_dir: Path | None,
    insecure: bool,
    dry_run: bool,
    as_json: bool,
    **of_others: Any,
) -> int:
    """Check the options, then run the relay; returns the exit code."""
    from fsl_async.process.stopper import Stopper, stop_on_signals

    for option, value in of_others.items():
        if value not in (None, (), False):
            flag = {"overrides": "set"}.get(option, option).replace("_", "-")
            raise UsageError(f"--{flag} is not a relay's, which forwards what it does not read")
    if address is None:
        raise UsageError(
            f"which server? Give the address in the line that it prints, like: {program()} --role relay --listen *:7100 {addresses.EXAMPLE}"
        )
    doors = doors_of(address, listen or DEFAULT_LISTEN, split, insecure=insecure)
    from fsl_async.nodes.relay.node import serve, usual_memory_mib

    output = Output(as_json=as_json, waits=False)
    if dry_run:
        output.result(
            {"role": "relay", "server": addresses.parse(address).fsl}
            | {"doors": [f"{one.listen} -> {one.server}" for one in doors]}
            | {"sealed": all(one.sealed for one in doors), "run_dir": str(run_dir or "")}
            | {"memory_mib": memory_mib or usual_memory_mib()}
        )
        return 0

    lines = _lines(output)

    def announce(bound: list[tuple[str, int]]) -> None:
        line = join_line(address, bound)
        for number, ((host, port), door) in enumerate(zip(bound, doors, strict=True)):
            place = addresses.Address(host, port).tcp
            join = "" if number else line
            output.record("listening", address=place, server=door.server, join=join)
            output.say(f"relay at {place} for {door.server}")
        output.say("on each client:", f"    {line}")
        output.record("capacity", connections=lines, clients_fit=lines // 2)

    def tell(note: Note) -> None:
        if output.as_json:
            output.record("note", text=note.text, level=note.level, **note.facts)
        elif note.level == "warning":
            output.warn(note.text)
        else:
            output.say(note.text)

    run_in_batches()
    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = serve(
            doors,
            run_dir=run_dir,
            memory_mib=memory_mib or 0,
            announce=announce,
            tell=tell,
            stop=stopper,
        )
    output.result(summary)
    return stopper.exit_code


def _lines(output: Output) -> int:
    """How many connections fit, which people are told where they are few. Raises UsageError where no client fits."""
    from fsl_async.nodes.relay.node import COMFORTABLE_LINES, checked_lines, lines_words

    lines = checked_lines()
    if lines < COMFORTABLE_LINES:
        output.say(lines_words(lines))
    return lines


def join_line(server: str, bound: list[tuple[str, int]]) -> str:
    """What to paste at each client: the server's address with the relay's places in it. The key stays the server's own."""
    from attrs import evolve

    (host, port), *others = bound
    reach = addresses.reachable_host(host)
    split = "".join(
        addresses.Address(addresses.reachable_host(one), other).tcp.removeprefix("tcp://")
        for one, other in others
    )
    place = evolve(addresses.parse(server), host=reach, port=port, split=split)
    return f"{program()} --role client --name SITE --data PATH {shlex.quote(place.fsl)}"


def doors_of(server: str, listen: str, split: str | None, *, insecure: bool) -> list[Door]:
    """The doors: for the parameter server, and with `--split PORT[=ADDRESS]` for the split server. Raises UsageError and AddressError."""
    from fsl_async.nodes.relay.node import Door

    main, target = addresses.parse_listen(listen), addresses.parse(server)
    wanted = [(main, target)]
    if split is None and target.split:
        raise UsageError(
            f"the address names a split server too, {target.split}: say at which port clients reach it here, --split 7101"
        )
    if split is not None:
        left, _, right = split.partition("=")
        if not (right or target.split):
            raise UsageError(
                f"--split {split}: say where the split server is, like --split 7101=split.example.org:7101"
            )
        where = f"{main.tcp.rpartition(':')[0]}:{left}" if left.isdecimal() else left
        wanted.append((addresses.parse_listen(where), addresses.parse(right or target.split)))
    doors = []
    for place, behind in wanted:
        # Who came encrypted to the one goes encrypted to the other as well.
        sealed = bool(target.key or behind.key)
        if not (sealed or insecure or (place.is_loopback and behind.is_loopback)):
            raise UsageError(
                f"{behind.fsl} has no key: everything would pass unencrypted, readable here and on the way; give the address with ?key=... "
                "as the server prints it, or accept it with --insecure"
            )
        doors.append(Door(place.tcp, behind.tcp, sealed))
    return doors
