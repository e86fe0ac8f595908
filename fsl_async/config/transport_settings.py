"""Derives the transport's settings from the configuration. Pure."""

from __future__ import annotations

import fsl_transport as tp
from fsl_async.config.settings import Config

MAX_CONNECTIONS = tp.TransportSettings().max_connections


def transport_settings(
    config: Config, max_connections: int = MAX_CONNECTIONS
) -> tp.TransportSettings:
    """Return the transport's settings. max_connections: of a listener."""
    return tp.TransportSettings(
        max_connections=max_connections,
        heartbeat_every_s=config.session.heartbeat_every_s,
        expire_after_s=config.session.expire_after_s,
        window_bytes=config.transfer.window_bytes,
        window_limit_bytes=config.transfer.window_limit_bytes,
        stripes_first=config.transfer.stripes_first,
        stripes_limit=config.transfer.stripes_limit,
        stall_s=config.transfer.stall_s,
    )
