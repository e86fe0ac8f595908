"""The allow-list's text: read strictly, and changed without losing a person's comments."""

import pytest
from zmq.utils import z85

from fsl_async.errors import KeysError
from fsl_async.keys import allow_list
from fsl_async.keys.allow_list import AllowList, Entry

# Fixed, because they stand in names of tests, which all of the workers that share tests out must
# agree about.
A, B, C = (z85.encode(bytes([number]) * 32).decode() for number in (1, 2, 3))


def test_a_list_as_people_write_it():
    """Comments, empty lines, tabs, and line ends of other systems."""
    text = f"# ours\n\n{A}  site-a\n#\n{B}\tr1\r\n  {C} site-c names=c,c-2\n\n"
    found = allow_list.parse(text, "f")
    assert list(found.entries.values()) == [
        Entry(A, "site-a"),
        Entry(B, "r1"),
        Entry(C, "site-c", ("c", "c-2")),
    ]
    assert found.entries.get(A) == Entry(A, "site-a")
    assert found.entries.get("x") is None
    assert found.owner("c-2") == found.labeled("site-c")
    assert found.owner("site-a") is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("abc site-a", "line 2: 'abc' is no public key (40 characters, by fsl-node keys pub)"),
        ("#abc site-a", "a comment begins with # and a space"),
        (f"{A[:-1]} site-a", "is no public key"),
        (f"{A}", "line 2: no label behind the key; write one, like site-a"),
        (f"{A} names=a", "no label behind the key"),
        (f"{A} site/a", "the label 'site/a' must be 1 to 64 letters"),
        (f"{A} site-a relay", "'relay' is not understood"),
        (f"{A} site-a role=relay", "'role=relay' is not understood"),
        (f"{A} site-a # the first", "'#' is not understood"),
        (f"{A} site-a names=a names=b", "names= twice"),
        (f"{A} site-a names=", "'' in names= is no client's name"),
        (f"{A} site-a names=a,,b", "'' in names= is no client's name"),
        (f"{A} site-a names=a,a", "a name twice in names="),
        (f"{A} site-a names=..", "'..' in names="),
        (f"{B} other", "line 2: this key is there already, as first"),
        (f"{A} first", "line 2: line 1 has the label first already"),
        (f"{A} site-a names=mine", "line 2: the name mine belongs to the key of line 1 already"),
        (f"{A} site-a\x1b[2J", "characters that cannot be printed"),
        (f"{A} site-a\u2028{C} site-b", "characters that cannot be printed"),
        (f"{A} site-a\x0b{C} site-b", "characters that cannot be printed"),
    ],
)
def test_a_wrong_line_is_named(line, problem):
    """A misread line could admit the wrong key, so the error has file and line."""
    with pytest.raises(KeysError) as caught:
        allow_list.parse(f"{B} first names=mine\n{line}\n", "allowed.txt")
    assert problem in caught.value.message
    assert caught.value.message.startswith("allowed.txt line 2: ")


def test_a_list_without_end():
    """The size of the file is checked before it is parsed."""
    with pytest.raises(KeysError, match="longer than"):
        allow_list.parse("\n" * (allow_list.MAX_BYTES + 1), "f")


def test_changes_leave_the_rest_as_it_was_written():
    """People write comments between the lines."""
    before = allow_list.parse(f"# north\n{A} a\n# south\n{B} b\n", "f")
    more = before.with_entry(Entry(C, "c", ("z",)))
    assert more.text() == f"# north\n{A} a\n# south\n{B} b\n{C}  c  names=z\n"
    changed = more.with_entry(Entry(A, "a2", names=("x",)))
    assert changed.text() == f"# north\n{A}  a2  names=x\n# south\n{B} b\n{C}  c  names=z\n"
    assert changed.without(B).text() == f"# north\n{A}  a2  names=x\n# south\n{C}  c  names=z\n"
    assert allow_list.parse(changed.text(), "f").entries == changed.entries


def test_a_change_that_would_not_be_read_back_is_refused():
    """The command checks the new list by the rules of reading."""
    before = AllowList().with_entry(Entry(A, "a"))
    with pytest.raises(KeysError, match="has the label a already"):
        before.with_entry(Entry(B, "a"))
    with pytest.raises(KeysError, match="no public key"):
        before.with_entry(Entry("x", "x"))
