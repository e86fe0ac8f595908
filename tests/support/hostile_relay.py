"""A relay that parses ZMTP's framing, records all frames, and changes them as a test asks."""

# ruff: noqa: D102 - a small double

import asyncio
import contextlib

SMALL, LARGE = "small", "large"
LARGE_BYTES = 3000
UP, DOWN = "up", "down"
HANDSHAKE = 2
"""Number of frames of CURVE's handshake in each direction: HELLO and INITIATE, WELCOME and
READY.
"""


def make_frame(flags, body):
    """Return the bytes of a ZMTP frame."""
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags & ~2, len(body)]) + body


class Frame:
    """One ZMTP frame as it was received."""

    def __init__(self, flags, body):
        self.flags = flags
        self.body = body

    @property
    def data(self):
        return make_frame(self.flags, self.body)

    @property
    def size(self):
        return LARGE if len(self.body) > LARGE_BYTES else SMALL


class Connection:
    """One connection through the relay, and everything it received."""

    def __init__(self, number, client, server):
        self.number = number
        self.writers = {UP: server, DOWN: client}
        self.raw = {UP: bytearray(), DOWN: bytearray()}
        self.frames = {UP: [], DOWN: []}

    @property
    def is_bulk(self):
        return any(frame.size == LARGE for way in (UP, DOWN) for frame in self.frames[way])

    def send(self, way, data):
        with contextlib.suppress(OSError):
            self.writers[way].write(data)

    def cut(self):
        for writer in self.writers.values():
            writer.transport.abort()


class HostileRelay:
    """A relay that sends what ``trick(connection, way, frame)`` returns instead of a frame.

    The trick returns a list of bytes, or None for the frame itself.
    """

    def __init__(self, target, trick=None):
        self.target = target
        self.trick = trick or (lambda *_: None)
        self.connections = []
        self.flowing = asyncio.Event()
        self.tasks = set()
        self.port = 0
        self.fired = []

    @property
    def is_through(self):
        """Whether its trick has been done as often as it should."""
        return not getattr(self.trick, "open", ())

    async def start(self):
        self.server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self):
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in self.connections:
            connection.cut()
        await self.server.wait_closed()
        await asyncio.sleep(0.01)

    async def _take(self, reader, writer):
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target())
        except OSError:
            writer.close()
            return
        connection = Connection(len(self.connections), writer, up_writer)
        self.connections.append(connection)
        for way, source in ((UP, reader), (DOWN, up_reader)):
            self.tasks.add(asyncio.ensure_future(self._pump(connection, way, source)))

    async def _pump(self, connection, way, reader):
        raw = connection.raw[way]

        async def read(size):
            data = await reader.readexactly(size)
            raw.extend(data)
            return data

        try:
            for size in (10, 1, 53):  # the greeting in parts: each side waits for the other's
                connection.send(way, await read(size))
            while True:
                flags = (await read(1))[0]
                size = int.from_bytes(await read(8 if flags & 2 else 1), "big")
                frame = Frame(flags, await read(size))
                instead = self.trick(connection, way, frame)
                connection.frames[way].append(frame)
                for data in [frame.data] if instead is None else instead:
                    connection.send(way, data)
                if instead is not None and getattr(self.trick, "cuts", False):
                    # libzmq leaves a connection with a forged frame open but reads no more from it.
                    asyncio.get_running_loop().call_later(0.05, connection.cut)
        except (OSError, asyncio.IncompleteReadError):
            connection.cut()
