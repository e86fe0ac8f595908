"""The page for Prometheus, read by Prometheus's own parser."""

import urllib.error
import urllib.request

import pytest
from tracked_run import SENT, TOKENS, TrackedRun

from fsl_async.observe.clients import ClientState
from fsl_async.observe.evaluations import Evaluation
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.run_state import RunState
from fsl_async.tools.trackers.catalog import CATALOG, Reading
from fsl_async.tools.trackers.prometheus import Page, is_for_us

parser = pytest.importorskip(
    "prometheus_client.parser", reason="the extra prometheus is not installed"
)


@pytest.fixture
def page():
    made = Page(0)
    yield made
    made.close()


def scrape(page, **headers):
    request = urllib.request.Request(page.url, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def samples_of(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_run_is_read_back(page, tmp_path):
    """Values, labels, types and help."""
    run = TrackedRun(tmp_path)
    run.join("a", "b")
    run.round("a", "b")
    run.flush()
    state = RunState()
    for line in JournalReader(run.writer.path).read():
        state.apply(line)
    assert samples_of(scrape(page)) == {}
    page.show([Reading(state, up=True, evaluations=[Evaluation(1, 1.5)])])
    text = scrape(page)
    ps, found = ("role", "ps"), samples_of(text)
    assert found["fsl_version", ps] == 1
    assert found["fsl_node_up", ps] == 1
    assert found["fsl_merged_tokens_total", ps] == 2 * TOKENS
    assert found["fsl_transfer_sent_bytes_total", ("direction", "up"), ps] == 2 * SENT
    assert found["fsl_client_loss", ("client", "b"), ps] == 4.0
    assert found["fsl_held_out_loss", ("data", ""), ("of", "weights"), ps] == 1.5
    assert found["fsl_clients", ps, ("state", "training")] == 2
    known = {one.name.removesuffix("_total"): one for one in CATALOG}
    for family in parser.text_string_to_metric_families(text):
        assert (family.type, family.documentation) == (
            known[family.name].kind,
            known[family.name].help,
        )
    run.writer.close()


def test_two_servers_of_a_process_are_told_apart(page):
    """By the label role: no sample is there twice."""
    ps, split = RunState(), RunState()
    split.node.role = "server"
    page.show([Reading(ps), Reading(split)])
    lines = [line for line in scrape(page).splitlines() if not line.startswith("#")]
    names = [line.rpartition(" ")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert 'fsl_node_up{role="server"}' in names


def test_text_from_a_journal_breaks_no_line(page):
    """A journal may come from elsewhere."""
    state = RunState()
    name = 'x"} 1\nfsl_evil 1\n\\'
    state.clients[name] = ClientState(name)
    page.show([Reading(state)])
    found = samples_of(scrape(page))
    assert found["fsl_client_connected", ("client", name), ("role", "ps")] == 0
    assert not any(key[0] == "fsl_evil" for key in found)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9720", "127.0.0.1.evil.example"])
def test_a_page_in_a_browser_reads_nothing(page, host):
    """Through a name of its own that leads to this machine."""
    with pytest.raises(urllib.error.HTTPError) as error:
        scrape(page, Host=host)
    error.value.close()
    assert error.value.code == 404


@pytest.mark.parametrize(
    ("path", "host", "answered"),
    [
        ("/metrics", "127.0.0.1:9720", True),
        ("/metrics", "localhost", True),
        ("/metrics", "[::1]:9720", True),
        ("/metrics", "[::1]", True),
        ("/metrics", "", False),
        ("/", "127.0.0.1:9720", False),
        ("/metrics/x", "localhost", False),
    ],
)
def test_which_requests_are_answered(path, host, answered):
    """Path and Host."""
    assert is_for_us(path, host) is answered
