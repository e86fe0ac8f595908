"""Addresses in three forms, and one precise error line for every other text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.config import address as addresses
from fsl_async.config.address import EXAMPLE, Address, parse, parse_listen, reachable_host
from fsl_async.errors import AddressError

WRITE = f"; write one like {EXAMPLE}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ps.example.org:7100", Address("ps.example.org", 7100)),
        ("tcp://10.0.0.1:7100", Address("10.0.0.1", 7100)),
        ("fsl://ps-1.example.org:7100", Address("ps-1.example.org", 7100)),
        ("fsl://ps:7100/?key=a%2Bb", Address("ps", 7100, "a+b")),
        ("fsl://[::1]:7100?key=k", Address("::1", 7100, "k")),
        ("localhost:1", Address("localhost", 1)),
    ],
)
def test_all_forms_are_read_and_written_back(text, expected):
    """A user pastes the line that the parameter server prints, so both forms must give the same
    address.
    """
    assert parse(text) == expected
    assert parse(expected.fsl) == expected
    assert parse(expected.tcp).port == expected.port


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the address is empty" + WRITE),
        ("ps", "ps: no port" + WRITE),
        ("fsl://ps", "fsl://ps: no port" + WRITE),
        ("ps:", "ps:: no port" + WRITE),
        (":7100", ":7100: no host" + WRITE),
        ("http://ps:80", "http://ps:80: unknown scheme http://" + WRITE),
        ("ps:70000", "ps:70000: port '70000' is not a number from 0 to 65535"),
        ("ps:-1", "ps:-1: port '-1' is not a number from 0 to 65535"),
        ("ps:\u0664", "ps:\u0664: port '\u0664' is not a number from 0 to 65535"),
        ("ps:0", "ps:0: port 0 cannot be dialed; give the port that the parameter server prints"),
        ("::1:7100", "::1:7100: put an IPv6 address in brackets, like tcp://[::1]:7100"),
        ("[::x]:7100", "[::x]:7100: not an IPv6 address; write one like tcp://[::1]:7100"),
        ("[::1", "[::1: not an IPv6 address; write one like tcp://[::1]:7100"),
        ("a b:1", "a b:1: 'a b' is not a host name" + WRITE),
        ("fsl://ps:1?kee=4", ("fsl://ps:1?kee=4: unknown part 'kee' after '?'; only key=... and"
         " split=host:port are known")),
        ("fsl://ps:1?key=", ("fsl://ps:1?key=: the key after '?' is empty; write ?key=... or"
         " remove it")),
        ("0.0.0.0:7100", ("0.0.0.0:7100: 0.0.0.0 means every interface of the listening machine;"
         f" give the host that runs the parameter server, for example {EXAMPLE}")),
        ("ps:1\n", "'ps:1\\n': not an address" + WRITE),
    ],
)  # fmt: skip
def test_wrong_addresses_get_one_line(text, line):
    """A wrong address is the most frequent mistake at a client, so the error gives an example."""
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert caught.value.message == line


def test_listening_knows_every_interface_and_any_port():
    """A listener may use `*` and port 0, a dialler may not."""
    assert parse_listen("tcp://*:0") == Address("0.0.0.0", 0)
    assert parse_listen("[::]:7100").is_everywhere
    with pytest.raises(AddressError, match="a listen address has no key"):
        parse_listen("fsl://h:1?key=a")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("ps", False)],
)
def test_loopback_is_only_loopback(host, loopback):
    """Only loopback addresses may be without encryption."""
    assert Address(host, 1).is_loopback is loopback


def test_reachable_host_names_one_interface(monkeypatch):
    """The line for clients must not have 0.0.0.0, also on a machine without a network."""
    assert reachable_host("10.1.1.1") == "10.1.1.1"
    assert reachable_host("0.0.0.0") not in {"0.0.0.0", "", "*"}

    def no_network(*_):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(addresses.socket, "socket", no_network)
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "thishost")
    assert reachable_host("0.0.0.0") == "thishost"


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_an_address_error(text):
    """Addresses come from command lines and files: any error is a printable AddressError."""
    for read in (parse, parse_listen):
        message = ""
        try:
            read(text)
        except AddressError as error:
            message = error.message
        assert message.isprintable()


def test_an_address_may_hold_that_of_a_split_server():
    """Behind a relay or a tunnel a client cannot use the address that the parameter server
    announces.
    """
    text = "fsl://relay.org:7100?key=a%3Ab&split=relay.org:7101"
    address = parse(text)
    assert (address.key, address.split) == ("a:b", "relay.org:7101")
    assert parse(address.fsl) == address
    assert parse("fsl://r:1?split=[::1]:2").fsl == "fsl://r:1?split=[::1]:2"
    for wrong in ("r:1?split=", "r:1?split=x", "r:1?split=*:7101", "r:1?split=a:0"):
        with pytest.raises(AddressError):
            parse(wrong)
