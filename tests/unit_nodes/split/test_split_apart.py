"""A parameter server and a split server in separate processes."""

import pytest

from fsl_async.config.address import Address, seen_from
from fsl_async.config.load import load
from fsl_async.config.recipes import with_split_server
from fsl_async.errors import AddressError, ConfigError
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier
from fsl_async.nodes.split_server import node as node_server
from fsl_async.process.stopper import Stopper
from fsl_transport.zmq.pipe import Pipe

UPLOADS = {"sl": 3, "splitfed-v1": 6, "splitfed-v2": 6, "cse-fsl": 4, "fsl-sage": 4}
"""Of two clients in a round of three batches; a relay's round is one client's."""


@pytest.mark.parametrize(
    "case",
    [
        ("sl", "lockstep", ("split.labels_at_home=true",), 2),
        ("fsl-sage", "free", ("split.align_every=1",), 1),
        *(
            pytest.param(one, marks=pytest.mark.sweep)
            for one in (
                ("sl", "free", (), 1),
                ("splitfed-v1", "lockstep", (), 1),
                ("splitfed-v1", "free", ("split.labels_at_home=true",), 2),
                ("splitfed-v2", "free", (), 1),
                ("cse-fsl", "lockstep", (), 1),
                ("fsl-sage", "lockstep", ("split.align_every=2",), 1),
            )
        ),
    ],
)
def test_two_servers_run_every_method(nodes, configured, text, case):
    """They usually run on different machines.

    They learn of each other through clients only.
    """
    method, mode, more, legs = case
    chosen = f"split.method={method}", f"split.mode={mode}", f"data.path={text}", "run.rounds=3"
    run = nodes(configured(*chosen, *more), apart=True)
    assert run.summaries["ps"].version == 3
    assert run.summaries["server"].uploads == 3 * legs * UPLOADS[method]
    assert run.summaries["server"].reason == "the run has ended"
    assert run.summaries["server"].run == run.summaries["ps"].run
    clients = [run.summaries[name] for name in run.names]
    assert all(client.tokens == client.tokens_acknowledged for client in clients)
    assert sum(client.tokens for client in clients) == run.summaries["ps"].tokens


def test_every_socket_of_a_run_uses_its_settings(nodes, configured, text, monkeypatch):
    """Parameter server and split server from the start, a client from its welcome on.

    Buffers and times are settings of the run.
    """
    used, adopt = {}, Pipe.adopt

    def adopted(pipe, settings):
        used[id(pipe)] = settings
        held.append(pipe)
        adopt(pipe, settings)

    held = []  # so that no two of them have the same id
    monkeypatch.setattr(Pipe, "adopt", adopted)
    config = configured(
        "split.method=splitfed-v1", f"data.path={text}", "transfer.window_limit_bytes=30000000"
    )
    nodes(config, apart=True)
    listeners, notifier, clients = 2, 2, 2 * 2 * 2
    assert len(used) >= listeners + notifier + clients
    assert set(used.values()) == {config.transport()}


@pytest.mark.parametrize("reported", [True, False])
def test_a_run_that_ends_while_no_client_is_there(nodes, configured, text, reported, monkeypatch):
    """The parameter server sends the end itself.

    If it cannot, the split server does not wait forever.
    """
    if not reported:
        monkeypatch.setattr(RunEndNotifier, "run_ended", lambda *_: None)
    chosen = "split.method=fsl-sage", f"data.path={text}", "run.seconds=0.5", "split.alone_s=0.5"
    run = nodes(configured(*chosen, "session.expire_after_s=1.5"), apart=True, names=())
    reason = run.summaries["server"].reason
    assert reason.startswith(
        "the run has ended" if reported else "no client and no parameter server"
    )
    assert run.summaries["ps"].reason != reason


def test_the_split_servers_address_is_given_or_derived():
    """A client must not dial an empty address, or every interface of its own machine."""
    on = ("split.method=fsl-sage", "split.listen=tcp://0.0.0.0:7101")
    assert with_split_server(load(None, on)).split.server == "tcp://0.0.0.0:7101"
    assert with_split_server(load(None, [*on, "split.server=a:1"])).split.server == "a:1"
    with pytest.raises(ConfigError, match="say where clients reach"):
        with_split_server(load(None, ["split.method=sl", "split.listen=tcp://127.0.0.1:0"]))
    # If clients reach the parameter server encrypted, they reach the split server encrypted.
    key = "a" * 40
    assert with_split_server(load(None, on), key).split.server == f"fsl://0.0.0.0:7101?key={key}"
    given = f"split.server=fsl://a:1?key={key}"
    assert with_split_server(load(None, [*on, given]), key).split.server == given[13:]
    local = with_split_server(load(None, [*on, "split.server=127.0.0.1:1"]), key)
    assert local.split.server == "127.0.0.1:1"
    with pytest.raises(ConfigError, match="has no key"):
        with_split_server(load(None, [*on, "split.server=a:1"]), key)
    for off in ("split.method=fedavg", "split.method=none"):
        config = load(None, [off, "split.listen=tcp://127.0.0.1:0"])
        assert with_split_server(config) is config


def test_every_interface_means_the_machine_that_was_dialed():
    """Other machines may not reach the address at which a process listens."""
    assert seen_from("tcp://0.0.0.0:7101", "tcp://a.org:7100") == Address("a.org", 7101)
    assert seen_from("10.0.0.7:7101", "tcp://a.org:7100") == Address("10.0.0.7", 7101)
    # The key is the split server's own.
    assert (
        seen_from("fsl://0.0.0.0:7101?key=k", "fsl://a.org:1?key=x").fsl == "fsl://a.org:7101?key=k"
    )
    # Behind a relay neither address is right; the key is.
    relayed = "fsl://relay.org:1?key=x&split=[::1]:7201"
    assert seen_from("fsl://10.0.0.7:7101?key=k", relayed) == Address("::1", 7201, "k")
    with pytest.raises(AddressError, match="port 0"):
        seen_from("tcp://0.0.0.0:0", "tcp://ps.example.org:7100")


def test_a_split_server_listens_on_loopback_by_default(tmp_path):
    """Its port is as open as the parameter server's."""
    overrides = [
        "split.method=splitfed-v2",
        "split.listen=0.0.0.0:7301",
        "listen.address=127.0.0.1:0",
    ]
    with pytest.raises(ConfigError, match=r"split\.listen: .*--insecure"):
        node_server.serve(
            load(None, overrides),
            tmp_path,
            with_ps=True,
            announce=lambda *_: None,
            log=lambda _: None,
            stop=Stopper(),
        )
