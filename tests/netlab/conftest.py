"""One network laboratory for all tests of this folder, where this machine can have one."""

import pytest
from netlab.host import LabError, MissingError, namespaces, processes_with
from netlab.laboratory import Laboratory, which
from netlab.machine import console_word
from netlab.records import folder, names

WAY = pytest.StashKey[str]()


def left_of(name):
    """Return what remains of a laboratory: namespaces, router VM, state."""
    found = [one for one in namespaces() if one.startswith(f"fsl-{name}-")]
    found += [str(pid) for pid in processes_with(console_word(folder(name)))]
    return found + [one for one in names() if one == name]


@pytest.fixture(scope="session")
def backend(request):
    """Return the backend of links on this machine; skips where there is none."""
    try:
        way = which()
    except MissingError as error:
        request.config.stash[WAY] = f"none, {error.message}"
        pytest.skip(error.message)
    request.config.stash[WAY] = way
    return way


@pytest.fixture(scope="session")
def built(backend):
    """A laboratory of a server and two clients; checks that nothing remains of it."""
    made = Laboratory(["server", "client-1", "client-2"], profile="lan")
    with made:
        yield made
    assert left_of(made.name) == []


@pytest.fixture
def lab(built):
    """The laboratory `built`, with its links reset to perfect ones."""
    built.set("all", "heal", "lan")
    return built


@pytest.fixture
def left():
    """The function `left_of`."""
    return left_of


@pytest.fixture
def sweeper(backend):
    """Removes a test's own laboratories if it fails."""
    from netlab.laboratory import remove

    made = []
    yield made.append
    for name in made:
        try:
            remove(name)
        except LabError:
            continue


def pytest_terminal_summary(terminalreporter, config):
    """Print the backend that was used."""
    way = config.stash.get(WAY, "")
    if way:
        terminalreporter.write_line(f"network laboratory: {way}")
