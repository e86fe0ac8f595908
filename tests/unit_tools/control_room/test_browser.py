"""The page in a real Chromium: the data that is drawn, dark and narrow, hostile names, live lines.

Needs Debian's chromium (bin/chromium-setup) and playwright (extra `dev`).
"""

import asyncio
import contextlib
import json
import queue
import shutil
import threading

import pytest
from run_journals import JournalFile

from fsl_async.tools.control_room.server import serve
from fsl_async.tools.control_room.snapshot import watch

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("aiohttp", reason="aiohttp (extra `web`) is not installed")

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no chromium; bin/chromium-setup installs it", allow_module_level=True)

EVIL = "<img src=x onerror=window.evil=1>\"'&"
CHARTS = """() => [...room.nodes.values()].map((node) => ({
  labels: node.chart ? node.chart.series.slice(1).map((one) => one.label) : [],
  data: node.chart ? node.chart.data.map((one) => [...one]) : [],
  bytes: node.bytesChart ? node.bytesChart.data.map((one) => [...one]) : [],
}))"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def journal(tmp_path):
    made = JournalFile(tmp_path / "run")
    made.join(1.0, "a", "b", EVIL)
    made.round(10.0, 0, {"a": 5.0, "b": 4.0, EVIL: 3.0})
    made.traffic(15.0, 1000)
    made.round(20.0, 1, {"a": 4.0, EVIL: 2.0}, missing=["b"])
    made.client(25.0, "b", "gone", why="expired")
    made.client(28.0, "b", "joining", incarnation=2, begins=True, in_run=True)
    made.client(29.0, "b", "training", 2, 2)
    made.round(30.0, 2, {"a": 3.0, "b": 2.0, EVIL: 1.0})
    made.traffic(35.0, 3000)
    return made


@contextlib.contextmanager
def served(folder):
    """The address of a run's page, served by a thread."""
    found, loop = queue.Queue(), asyncio.new_event_loop()

    def run():
        nodes = watch(folder)
        task = loop.create_task(serve(nodes, 0, found.put))
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found.get(timeout=20)
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join()


@contextlib.contextmanager
def opened(browser, folder, **context):
    """The page of a run, when all that the journal has is drawn. It must report no error."""
    with served(folder) as url, contextlib.closing(browser.new_context(**context)) as made:
        page, errors = made.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda one: errors.append(one.text) if one.type == "error" else None)
        page.goto(url)
        page.wait_for_function("() => document.body.dataset.complete === 'yes' && room.idle()")
        yield page
        assert errors == []


def test_what_is_drawn_is_what_the_journal_has(browser, journal):
    with opened(browser, journal.path.parent, viewport={"width": 1200, "height": 900}) as page:
        assert "token" not in page.url
        (node,) = page.evaluate(CHARTS)
        assert node["labels"] == [EVIL, "a", "b", "mean"]
        assert page.locator(".rounds-legend li").all_inner_texts() == [EVIL, "a", "b", "mean"]
        rounds, evil, first, second, mean = node["data"]
        assert rounds == [0, 1, 2]
        assert evil == [3, 2, 1]
        assert first == [5, 4, 3]
        assert second == [4, None, 2]  # a gap is a gap
        assert mean == [4, 3, 2]
        assert page.evaluate("[...room.nodes.values()][0].chart.series[3].spanGaps") is False
        t, raw_up, coded_up, sockets_up, *_ = node["bytes"]
        assert [one - journal.begin for one in t] == [15, 35]
        assert (raw_up, coded_up, sockets_up) == ([12000, 32000], [3702, 9872], [500, 1500])
        page.select_option("select.axis", "tokens")
        page.wait_for_function("() => [...room.nodes.values()][0].chart.data[0][0] === 300")
        assert page.evaluate(CHARTS)[0]["data"][0] == [300, 500, 800]
        page.select_option("select.axis", "t")
        page.wait_for_function("() => [...room.nodes.values()][0].chart.data[0][0] > 1e9")
        page.select_option("select.value", "coded")
        page.wait_for_function("() => [...room.nodes.values()][0].chart.data.length === 4")
        assert page.evaluate(CHARTS)[0]["data"][3] == [1234, None, 1234]
        # fetching, training, late, gone, fetching, training, sending, training
        row = page.locator('.timeline svg[data-site="b"]')
        assert int(row.get_attribute("data-segments")) >= 7
        assert row.get_attribute("data-marks") == "1"
        states = {one.get_attribute("class") for one in row.locator("path").all()}
        assert {"training", "late", "gone", "sending", "mark"} <= states
        sites = [one.get_attribute("data-site") for one in page.locator("#map .site").all()]
        assert sites == [EVIL, "a", "b"]
        titles = page.locator("table.sites th").all_inner_texts()
        cells = page.locator('table.sites tr[data-site="b"] td').all_inner_texts()
        row = dict(zip(titles, cells, strict=True))
        assert (row["merged"], row["coded"], row["relaunches"]) == ("2", "2.5 kB", "1")
        assert "version 3" in page.locator(".header").inner_text()


def test_held_out_losses_are_where_their_versions_are(browser, journal):
    rows = [
        {"version": 0, "loss": 6.0, "of": "weights", "data": "x.txt"},
        {"version": 1, "loss": 5.5, "of": "weights", "data": "x.txt"},
        {"version": 3, "loss": 3.5, "of": "weights", "data": "x.txt"},
        {"version": 3, "loss": 3.25, "of": "mean", "data": "x.txt"},
        {"version": 3, "loss": 7.0, "of": "weights", "data": "y.txt"},
        {"version": 9, "loss": 1.0, "of": "weights", "data": "y.txt"},  # there is none
    ]
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    (journal.path.parent / "evaluations.jsonl").write_text(lines)
    x, mean, y = (
        "held out on x.txt",
        "held out on x.txt, mean of late versions",
        "held out on y.txt",
    )
    with opened(browser, journal.path.parent) as page:
        page.wait_for_function("() => [...room.nodes.values()][0].chart.data.length === 8")

        def drawn():
            (node,) = page.evaluate(CHARTS)
            series = dict(zip(node["labels"], node["data"][1:], strict=True))
            return node["data"][0], series["b"], [series[name] for name in (x, mean, y)]

        axis, second, held_out = drawn()
        assert axis == [0, 1, 2, 3]
        assert second == [4, None, 2, None]
        last = [None, None, None]
        assert held_out == [[6, 5.5, None, 3.5], [*last, 3.25], [*last, 7]]
        page.select_option("select.axis", "tokens")
        page.wait_for_function("() => [...room.nodes.values()][0].chart.data[0][1] === 300")
        axis, second, held_out = drawn()
        assert axis == [0, 300, 500, 800]
        assert second == [None, 4, None, 2]
        assert held_out == [[6, 5.5, None, 3.5], [*last, 3.25], [*last, 7]]
        page.select_option("select.axis", "t")
        page.wait_for_function("() => [...room.nodes.values()][0].chart.data[0][0] > 1e9")
        axis, second, held_out = drawn()
        assert [one - journal.begin for one in axis] == [12.5, 22.5, 32.5]
        assert held_out == [[5.5, None, 3.5], [None, None, 3.25], [None, None, 7]]


def test_new_lines_are_drawn_without_a_reload(browser, journal):
    with opened(browser, journal.path.parent) as page:
        for number in range(3, 53):
            journal.round(10.0 * number + 10, number, {"a": 2.0, "b": 1.5})
        page.wait_for_function(
            "() => [...room.nodes.values()][0].chart.data[0].length === 53", timeout=5000
        )
        (node,) = page.evaluate(CHARTS)
        assert node["data"][1] == [3, 2, 1] + [None] * 50
        assert page.locator(".facts").inner_text().count("53") >= 1
        rows = "document.querySelectorAll('.timeline .label').length"
        journal.client(600.0, "x", "joining", incarnation=1, begins=True)
        page.wait_for_function(f"() => {rows} === 4", timeout=5000)
        journal.client(601.0, "x", "refused", incarnation=-1, why="its name is taken")
        page.wait_for_function(f"() => {rows} === 3", timeout=5000)


def test_a_hidden_tab_gives_its_connection_back(browser, journal):
    show = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with opened(browser, journal.path.parent) as page:
        source = page.evaluate_handle("room.connection.source")
        page.evaluate(show, True)
        assert source.evaluate("(one) => one.readyState") == 2  # closed
        assert "not shown" in page.locator("#link").inner_text()
        journal.round(40.0, 3, {"a": 2.0})
        page.evaluate(show, False)
        page.wait_for_function("() => [...room.nodes.values()][0].chart?.data[2]?.[3] === 2")
        assert page.evaluate(CHARTS)[0]["data"][2] == [5, 4, 3, 2]
        assert page.locator("#link").inner_text() == "connected"


def test_names_of_the_network_are_text(browser, journal):
    with opened(browser, journal.path.parent) as page:
        assert page.evaluate("window.evil") is None
        assert page.locator("main img").count() == 0
        assert page.locator(".timeline .label").first.inner_text() == EVIL
        assert page.locator("#map .site text").first.text_content().startswith("<img src")
