"""Which model a run has, and what becomes of clients with another one: machine, shell and store."""

import numpy as np
import pytest
from ps_shells import AtOnce, Later, Server

import fsl_transport as tp
from fsl_async.learn.client.delta_coder import LOSSLESS
from fsl_async.roles.sync import messages as msg
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_codecs import encode

ONE, OTHER_BASE = (
    Manifest.from_wire([["w", [3], 0, False]], [["base", "float32 2", digit * 16]])
    for digit in "ab"
)
STREAM = "initial:a/1"


@pytest.fixture
def start(tmp_path):
    """Start a parameter server with a real store, which continues the run of the one before."""
    servers = []

    def made(worker):
        for earlier in servers:
            earlier.store.close()
        servers.append(Server(worker=worker, store=Store(tmp_path, StoreSettings())))
        if len(servers) == 1:
            servers[0].store.run.start_run("run")
        return servers[-1]

    yield made
    servers[-1].store.close()


def say_hello(server, name):
    body = {"run": "", "version": -1, "digest": "", "shard": -1}
    server.shell.on_transport(tp.HelloReceived(name, 1, body, "client"))


def send_initial(server, work=lambda: None):
    """Send all initial weights of client a."""
    meta = msg.to_wire(msg.InitialMeta(ONE.fingerprint))
    server.shell.on_transport(tp.StreamOffered("a", STREAM, meta, 1))
    work()
    frame = encode(np.zeros(3, np.float32), LOSSLESS)
    server.endpoint.last("accept")[3].write(0, frame, lambda _: None)
    work()
    server.shell.on_transport(tp.StreamReceived("a", STREAM))


def test_the_model_is_fixed_once_the_initial_weights_have_arrived(start):
    """The publisher may leave while version 0 is written; another model must not take its place."""
    worker = Later()
    server = start(worker)
    for name in "ab":
        say_hello(server, name)
    worker.work()
    server.attach("a", ONE)
    worker.work()
    send_initial(server, worker.work)
    server.leave("a")  # finish_initial is with the worker
    server.attach("b", OTHER_BASE)
    worker.work()
    assert server.shell.machine.version == 0
    assert server.shell.context.manifest == server.store.manifest == ONE
    assert any("frozen tensor 'base'" in note for note in server.notes)


def test_other_frozen_weights_are_refused_after_a_restart_too(start):
    """The digest is on disk beside the names and shapes."""
    server = start(AtOnce())
    say_hello(server, "a")
    server.attach("a", ONE)
    send_initial(server)
    server = start(AtOnce())
    say_hello(server, "b")
    server.attach("b", OTHER_BASE)
    assert any("frozen tensor 'base'" in note for note in server.notes)


@pytest.mark.parametrize(
    "frozen",
    [
        *(None, 5, "a" * 16, {}, ["b"], [["b", "float32 2"]], [["b", "float32 2", 5]]),
        *([["b", form, "a" * 16]] for form in ("", "float32", "float32 2x", "\x1b[1m 2")),
        [["b", "float32 " + "9x" * 16 + "9", "a" * 16]],
        *([["b", "float32 2", bad]] for bad in ("A" * 16, "a" * 15, "a" * 17, "a" * 16 + "\n")),
        *([[bad, "float32 2", "a" * 16]] for bad in ("", "\x1b[1m", "b" * 601, 5)),
        [["b", "float32 2", "a" * 16]] * 2,
        [[f"{number:05}", "float32 2", "a" * 16] for number in range(2049)],
    ],
)
def test_frozen_tensors_of_another_form_end_the_session(start, frozen):
    """They are compared, stored and printed, so their form and number are checked first."""
    server = start(AtOnce())
    say_hello(server, "a")
    body = msg.to_wire(msg.Attach("a" * 32, ONE.to_wire(), [])) | {"frozen": frozen}
    server.shell.on_transport(tp.MessageReceived("a", body))
    assert server.endpoint.calls[-1][0] == "disconnect"


@pytest.mark.parametrize("wrong", ["a second model", "no message"])
def test_a_rejected_client_that_breaks_the_protocol_keeps_no_shard(start, wrong):
    """Else a peer could take all shards with names that it never uses again."""
    server = start(AtOnce())
    say_hello(server, "a")
    server.attach("a", ONE)
    say_hello(server, "m")
    server.attach("m", OTHER_BASE)
    if wrong == "no message":
        server.shell.on_transport(tp.MessageReceived("m", {"m": "nonsense"}))
    else:
        server.attach("m", OTHER_BASE)
    assert set(server.shell._models) <= {"a"}
    server.scheduler.call_at(1000.0, lambda: None)
    while server.scheduler.time() < 1000 and server.scheduler.run_next():
        pass
    say_hello(server, "next")
    assert server.endpoint.last("welcome")[1] == "next", server.notes


def test_a_client_with_another_base_is_told_what_to_do(start):
    """The line is all that its user sees: the tensor, both digests, one advice."""
    server = start(AtOnce())
    say_hello(server, "a")
    server.attach("a", ONE)
    send_initial(server)
    say_hello(server, "b")
    server.attach("b", OTHER_BASE)
    (note,) = [note for note in server.notes if "frozen tensor" in note]
    assert f"(float32 2) has digest {'b' * 16} here and {'a' * 16} there" in note
    assert note.endswith("(1 of 1 differ): load the same base model at every client")
