"""Few open files: a server admits the clients that fit, and does not start if the planned ones do
not.
"""

import contextlib
import socket
import time

import pytest

pytestmark = pytest.mark.slow


def stands(connection):
    """Return whether it received a greeting and is still open."""
    # not blocking: a handshake that does not go on is closed after 10 s
    connection.setblocking(False)
    greeted = False
    try:
        while connection.recv(64):
            greeted = True
    except BlockingIOError:
        return greeted
    except OSError:
        return False
    return False


def standing(address, count):
    """Open `count` connections; returns how many are greeted and open a second later."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection((host, int(port)), 10))
            for _ in range(count)
        ]
        time.sleep(1.0)
        return sum(map(stands, opened))


def test_a_parameter_server_with_200_open_files_serves_its_40_clients(site):
    """The limit is reported, and 40 clients have their connections under it."""
    server = site.server(open_files=200, sync__clients=40)
    line = server.wait_for("open files are allowed")
    assert line.startswith("200 open files are allowed: room for ")
    fits = int(line.split("so for ")[1].split()[0])
    assert fits >= 40
    assert standing(site.address, 80) == 80
    clients = [site.client(name) for name in "ab"]
    site.wait_version(1)
    assert standing(site.address, 200) <= 2 * fits + 1 - 4, "the two clients have four"
    before = site.ledger("version")[-1]["version"]
    site.wait_version(before + 2)
    assert all(client.popen.poll() is None for client in clients)


def test_a_client_does_not_start_with_24_open_files(site):
    """Libzmq would abort the process, with an exit code that means nothing to a launcher."""
    task = f"{site.folder / 'task.py'}:train"
    client = site.start(
        "--role", "client", "--name", "a", "--task", task, "127.0.0.1:9", open_files=24
    )
    assert client.end() == 2, client.text
    (line,) = client.lines
    assert line.startswith("error: 24 open files are allowed, too few for a client")
    assert 28 <= int(line.split("ulimit -n ")[1].split(")")[0]) <= 64
