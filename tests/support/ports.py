"""Free ports of this machine."""

import socket


def free_ports(count):
    """Return ports of loopback that nothing listens on now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
