"""A client's session with the split server of its run, if its method has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.config.site_policy import METRICS
from fsl_async.config.split_rules import split_rules
from fsl_async.config.transport_settings import transport_settings
from fsl_async.keys.dialling import split_curve
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.split_streams import Formats
from fsl_async.roles.split.client import SplitClientMachine

if TYPE_CHECKING:
    from fsl_async.learn.split.remote import SplitTraining
    from fsl_async.nodes.client.parts import ClientParts, Membership
    from fsl_async.nodes.runtime import Worker
    from fsl_async.roles.machine import Event, Finish, Note


class SplitSession:
    """The session. On the loop thread. Raises AddressError and KeysError."""

    def __init__(
        self,
        parts: ClientParts,
        member: Membership,
        training: SplitTraining,
        architecture: dict[str, str],
        *,
        worker: Worker,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        config, name = member.config, parts.options.name
        settings = transport_settings(config)
        place = addresses.seen_from(config.split.server, parts.address.fsl)
        curve = split_curve(place, parts.keys, encrypted=parts.curve is not None)
        link, reports = parts.dial(loop, place, curve, settings)
        incarnation = parts.machine.incarnation
        split = config.split

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            self._endpoint = endpoint = tp.DialerEndpoint(
                link,
                loop,
                settings,
                reports.beside(take),
                name,
                incarnation=incarnation,
                role="split-client",
            )
            return endpoint

        self._shell = SplitClientShell(
            SplitClientMachine(split_rules(config), name, incarnation),
            training,
            dialer,
            facts=Facts(member.welcome.run, member.welcome.shard, architecture),
            formats=Formats(split.up, split.down, split.models, config.codec.step_log2),
            worker=worker,
            scheduler=loop,
            journal=parts.journal,
            say=say,
            finished=finished,
            traffic=parts.traffic,
            shares_metrics=parts.options.policy.lets(METRICS),
        )
        self._shell.dial()

    def feed(self, event: Event) -> None:
        """Take an event of the training thread."""
        self._shell.feed(event)

    def end(self, event: Event) -> None:
        """Report that the run or this client's training is over."""
        self._shell.node.feed(event)

    async def aclose(self) -> None:
        """Close the session."""
        self._shell.node.close()
        await self._endpoint.aclose()
