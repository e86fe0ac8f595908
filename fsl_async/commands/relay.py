"""`fsl-node --role relay SERVER`: forward what clients and a server send to each other, unread."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fsl_async.commands.output import Output
from fsl_async.config import address as addresses
from fsl_async.errors import UsageError, program

if TYPE_CHECKING:
    from fsl_async.commands.node import NodeOptions
    from fsl_async.nodes.relay.relay import Route
    from fsl_async.roles.machine import Note

DEFAULT_LISTEN = "tcp://127.0.0.1:7100"


def command(options: NodeOptions) -> int:
    """Check the options, then run the relay; returns the exit code."""
    from fsl_async.process.stopper import Stopper, stop_on_signals

    address, run_dir = options.address, options.run_dir
    if address is None:
        raise UsageError(
            "which server? Give the address in the line that it prints, like:"
            f" {program()} --role relay --listen *:7100 {addresses.EXAMPLE}"
        )
    listen = options.listen or DEFAULT_LISTEN
    routes = routes_of(address, listen, options.split, insecure=options.insecure)
    from fsl_async.nodes.relay.relay import serve

    output = Output(as_json=options.as_json, waits=False)
    if options.dry_run:
        output.result(
            {
                "role": "relay",
                "server": addresses.parse(address).fsl,
                "routes": [f"{one.listen} -> {one.server}" for one in routes],
                "encrypted": all(one.requires_curve for one in routes),
                "run_dir": str(run_dir or ""),
            }
        )
        return 0

    connections = _connections(output)

    def announce(bound: list[tuple[str, int]]) -> None:
        line = join_line(address, bound)
        for number, ((host, port), route) in enumerate(zip(bound, routes, strict=True)):
            place = addresses.Address(host, port).tcp
            join = "" if number else line
            output.record("listening", address=place, server=route.server, join=join)
            output.say(f"relay at {place} for {route.server}")
        output.say("on each client:", f"    {line}")
        output.record("capacity", connections=connections, clients_fit=connections // 2)

    def tell(note: Note) -> None:
        if output.as_json:
            output.record("note", text=note.text, level=note.level, **note.facts)
        elif note.level == "warning":
            output.warn(note.text)
        else:
            output.say(note.text)

    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = serve(routes, run_dir=run_dir, announce=announce, tell=tell, stop=stopper)
    output.result(summary)
    return stopper.exit_code


def _connections(output: Output) -> int:
    """Return how many fit, and say so where they are few. Raises UsageError for too few."""
    from fsl_async.nodes.relay.relay import COMFORTABLE_CONNECTIONS, checked_connections

    found = checked_connections()
    if found < COMFORTABLE_CONNECTIONS:
        output.say(
            f"the limit of open files leaves room for {found:,} connections, so for {found // 2:,}"
            " clients with two each, half of them from one address (ulimit -n raises it)"
        )
    return found


def join_line(server: str, bound: list[tuple[str, int]]) -> str:
    """Return what to paste at each client: the server's address and key, at the relay's places."""
    from attrs import evolve

    (host, port), *others = bound
    reach = addresses.reachable_host(host)
    split = "".join(
        addresses.Address(addresses.reachable_host(one), other).tcp.removeprefix("tcp://")
        for one, other in others
    )
    place = evolve(addresses.parse(server), host=reach, port=port, split=split)
    return f"{program()} --role client --name SITE --data PATH {shlex.quote(place.fsl)}"


def _is_itself(place: addresses.Address, target: addresses.Address) -> bool:
    """Whether a relay that listens at `place` would dial itself."""
    is_here = place.host == target.host or (
        target.is_loopback and (place.is_loopback or place.is_everywhere)
    )
    return is_here and place.port == target.port


def routes_of(server: str, listen: str, split: str | None, *, insecure: bool) -> list[Route]:
    """Return the route to the parameter server and, with `split`, the one to the split server.

    split: PORT[=ADDRESS], as of `--split`. Raises UsageError and AddressError.
    """
    from fsl_async.nodes.relay.relay import Route

    main, target = addresses.parse_listen(listen), addresses.parse(server)
    wanted = [(main, target)]
    if split is None and target.split:
        raise UsageError(
            f"the address names a split server too, {target.split}:"
            " say at which port clients reach it here, --split 7101"
        )
    if split is not None:
        left, _, right = split.partition("=")
        if not (right or target.split):
            raise UsageError(
                f"--split {split}: say where the split server is,"
                " like --split 7101=split.example.org:7101"
            )
        where = f"{main.tcp.rpartition(':')[0]}:{left}" if left.isdecimal() else left
        wanted.append((addresses.parse_listen(where), addresses.parse(right or target.split)))
    routes = []
    for place, behind in wanted:
        if _is_itself(place, behind):
            raise UsageError(
                f"this relay would forward {place.tcp} to itself: give --listen another port"
            )
        # A client that comes encrypted to the one goes encrypted to the other as well.
        requires_curve = bool(target.key or behind.key)
        if not (requires_curve or insecure or (place.is_loopback and behind.is_loopback)):
            raise UsageError(
                f"{behind.fsl} has no key: everything would pass unencrypted, readable here and on"
                " the way; give the address with ?key=... as the parameter server prints it, or"
                " accept it with --insecure"
            )
        routes.append(Route(place.tcp, behind.tcp, requires_curve))
    return routes
