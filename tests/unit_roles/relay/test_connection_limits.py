"""Who gets a place at a relay."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_async.roles.relay.connection_limits import ConnectionLimits, ConnectionRules


def come(newcomers, address, now=0.0):
    """A connection comes; why it is refused, which ends it, or nothing."""
    refusal = newcomers.came(address, now)
    if refusal is None:
        return ""
    newcomers.gone(address, is_stranger=True)
    return refusal.text


def test_strangers_cannot_take_the_places_of_those_who_are_in():
    """New ones are bounded, of one address more tightly; those that are known do not count as new."""
    one = ConnectionLimits(ConnectionRules(lines=10, strangers=5, strangers_of_one=3))
    assert [come(one, "a") for _ in range(4)] == ["", "", "", "3 new connections of a already"]
    for _ in range(3):
        one.known("a")
    assert [come(one, address) for address in "bbbaa"] == [""] * 5
    assert come(one, "c") == "5 new connections already"
    one.known("b")
    one.known("b")
    assert [come(one, address) for address in "cc"] == [""] * 2
    one.known("b")
    assert come(one, "d") == "10 connections already"
    one.gone("a", is_stranger=False)
    assert come(one, "d") == ""


def test_of_an_address_with_somebody_known_twice_as_many_are_new():
    """Behind it may be a site's router, or another relay with a stranger at it."""
    one = ConnectionLimits(ConnectionRules(strangers_of_one=2))
    assert [come(one, "a") for _ in range(2)] == ["", ""]
    one.known("a")
    assert [come(one, "a") for _ in range(4)] == ["", "", "", "4 new connections of a already"]


def test_one_address_has_half_of_all_lines_at_the_most():
    """Also of those that are known: one client that forgets to close must not lock the others out."""
    one = ConnectionLimits(ConnectionRules(lines_of_one=2))
    for _ in range(2):
        assert come(one, "a") == ""
        one.known("a")
    assert come(one, "a") == "2 connections of a already"
    assert come(one, "b") == ""


def test_few_lines_are_shared_out_in_the_same_way():
    """With few files two addresses of silent strangers must not be able to take them all."""
    few = ConnectionRules().within(448)
    assert (few.lines, few.lines_of_one, few.strangers, few.strangers_of_one) == (448, 224, 112, 56)
    assert ConnectionRules().within(4096) == ConnectionRules().within(10_000) == ConnectionRules()
    least = ConnectionRules().within(1)
    assert (least.lines, least.lines_of_one, least.strangers, least.strangers_of_one) == (1,) * 4


def test_an_address_begins_no_more_connections_than_its_rate():
    """All at once up to the burst, and then by the rate; what is left is not more than the burst after any rest."""
    one = ConnectionLimits(ConnectionRules(dials_per_s=10, dials_burst=20))
    come(one, "a")
    come(one, "b")

    def dialled(address, now):
        count = 0
        while one.dials(address, now) is None:
            count += 1
        return count

    assert dialled("a", 0.0) == 20
    assert dialled("a", 0.55) == 5
    assert dialled("a", 0.65) == 1
    assert dialled("b", 0.65) == 20
    assert dialled("a", 1000.0) == 20
    refusal = one.dials("a", 1000.0)
    assert (refusal.text, refusal.word) == ("a connects more than 10 times a second", "too fast")


def test_behind_an_address_that_is_known_there_may_be_many():
    """A site's router, or another relay: twice the rate."""
    one = ConnectionLimits(ConnectionRules(dials_per_s=10, dials_burst=20))
    come(one, "a")
    one.known("a")
    count = 0
    while one.dials("a", 0.0) is None:
        count += 1
    assert count == 40
    one.gone("a", is_stranger=False)
    come(one, "a", 100.0)
    assert sum(one.dials("a", 100.0) is None for _ in range(50)) == 20


def test_who_is_shunned_comes_again_later_and_a_few_at_once_where_somebody_is_known():
    """Its neighbours behind one router are not to be locked out by it, however many of them are new."""
    one = ConnectionLimits(ConnectionRules(shun_s=5.0, let_in_shunned=2))
    for _ in range(5):
        come(one, "a")
    one.shun("a", 10.0)
    assert come(one, "a", 14.9) == "what a left here was too much"
    assert come(one, "b", 14.9) == ""
    assert come(one, "a", 15.0) == ""
    one.known("a")
    for begun in (20.0, 30.0):
        one.shun("a", begun)
        said = [come(one, "a", begun + 1) for _ in range(3)]
        assert said == ["", "", "what a left here was too much"]


def test_addresses_that_are_gone_are_forgotten():
    """However many come; who has a connection is not, nor, of few, who is shunned or has used his rate."""
    one = ConnectionLimits(ConnectionRules(places=10, strangers=1000, lines=1000))
    come(one, "stays")
    for number in range(500):
        address = f"a{number}"
        assert come(one, address) == ""
        one.dials(address, 0.0)
        one.gone(address, is_stranger=True)
        assert len(one) <= 12
    assert one.lines == one.strangers == 1
    one.shun("stays", 0.0)
    one.gone("stays", is_stranger=True)
    assert come(one, "stays", 1.0) == "what stays left here was too much"


def test_who_is_shunned_is_not_forgotten_for_those_who_only_came_and_went():
    """Of them there is nothing to remember."""
    one = ConnectionLimits(ConnectionRules(places=10))
    come(one, "bad")
    one.shun("bad", 0.0)
    one.gone("bad", is_stranger=True)
    for number in range(30):
        come(one, f"a{number}")
        one.gone(f"a{number}", is_stranger=True)
    assert len(one) < 12
    assert come(one, "bad", 1.0) == "what bad left here was too much"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["came", "known", "gone"]))))
def test_counts_are_those_of_what_is_there(steps):
    """Whatever happens in whichever order."""
    one = ConnectionLimits(ConnectionRules(places=1))
    there = []
    for address, step in steps:
        mine = [line for line in there if line[0] == address]
        strangers = [line for line in mine if line[1]]
        if step == "came":
            assert one.came(address, 0.0) is None
            there.append([address, True])
        elif step == "known" and strangers:
            strangers[0][1] = False
            one.known(address)
        elif step == "gone" and mine:
            there.remove(mine[-1])
            one.gone(address, is_stranger=mine[-1][1])
        assert one.lines == len(there)
        assert one.strangers == sum(is_stranger for _, is_stranger in there)
        for one_address in "abc":
            place = one._places.get(one_address)
            mine = [is_stranger for name, is_stranger in there if name == one_address]
            assert (place.strangers if place else 0) == sum(mine)
            assert (place.lines if place else 0) == len(mine)
