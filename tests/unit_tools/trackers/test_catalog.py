"""The catalog keeps Prometheus's conventions; docs and dashboard have what it has."""

import json
import re
from pathlib import Path

import pytest

from fsl_async.observe.clients import ClientState
from fsl_async.observe.evaluations import Evaluation
from fsl_async.observe.run_state import RunState
from fsl_async.tools.trackers.catalog import (
    CATALOG,
    MAX_CLIENTS,
    Reading,
    clients_of,
    series_of,
    table,
)

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples" / "grafana" / "fsl-async.json"


@pytest.mark.parametrize("figure", CATALOG, ids=lambda one: one.name)
def test_names_and_units(figure):
    """Base units, no abbreviation; labels are names, and a series has each of them."""
    assert re.fullmatch(r"fsl(_[a-z]+)+", figure.name)
    assert not re.search(r"_(ms|mb|kb|kib|pct|percent|count|s|sec)(_|$)", figure.name)
    if "bytes" in figure.name:
        assert figure.name.endswith(("_bytes", "_bytes_total"))
    assert figure.help.endswith(".")
    assert all(f"{{{label}}}" in figure.series for label in figure.labels if figure.series)
    assert "role" not in figure.labels


def test_names_are_there_once():
    """Each metric and each series."""
    assert len({one.name for one in CATALOG}) == len(CATALOG)
    series = [one.series for one in CATALOG if one.series]
    assert len(set(series)) == len(series)


def test_a_thousand_clients_are_not_a_thousand_labels():
    """Those that are here come first; how many are left out is a figure."""
    state = RunState()
    for number in range(1000):
        one = state.clients[f"c{number}"] = ClientState(f"c{number}")
        one.connected = number >= 990
        one.losses.append(1.0)
    listed = [client.name for client in clients_of(state)]
    assert len(listed) == MAX_CLIENTS
    assert listed[:11] == [*(f"c{number}" for number in range(990, 1000)), "c0"]
    samples = {one.name: one.samples(Reading(state)) for one in CATALOG}
    assert len(samples["fsl_client_connected"]) == MAX_CLIENTS
    assert len(samples["fsl_client_loss"]) == 10
    assert samples["fsl_clients_unlisted"] == [((), 1000 - MAX_CLIENTS)]


def test_what_is_not_finite_is_no_sample():
    """A loss that diverged is a gap, in every tracker."""
    state = RunState()
    client = state.clients["a"] = ClientState("a")
    client.connected = True
    client.losses.append(float("inf"))
    state.ps.loss = float("nan")
    found = series_of(Reading(state))
    assert "client_loss/a" not in found
    assert "loss/mean" not in found


@pytest.mark.parametrize("role", ["ps", "server", "client", "of another release"])
def test_a_run_without_a_line_has_figures(role):
    """A reader may be faster than the node; later each path leads to a field."""
    state = RunState()
    state.node.role = role
    assert all(isinstance(one.samples(Reading(state)), list) for one in CATALOG)
    state.clients["a"] = ClientState("a", connected=True)
    state.groups.is_on = True
    measured = Reading(state, evaluations=[Evaluation(1, 2.0)])
    assert all(isinstance(one.samples(measured), list) for one in CATALOG)
    assert "fsl_node_up" in {one.name for one in CATALOG if one.samples(measured)}


def test_the_docs_have_the_catalog():
    """Copy the table from `catalog.table()` after a change."""
    text = (ROOT / "docs" / "TRACKERS.md").read_text()
    assert "\n".join(table()) in text


def test_the_dashboard_asks_for_what_is_exported():
    """Each metric and each label of its queries."""
    dashboard = json.loads(DASHBOARD.read_text())
    names = {one.name: {"role", "instance", "job", *one.labels} for one in CATALOG}
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    queries += [
        one["query"]["query"]
        for one in dashboard["templating"]["list"]
        if "query" in one and isinstance(one["query"], dict)
    ]
    assert len(queries) > 20
    for query in queries:
        asked = re.findall(r"\bfsl_[a-z_]+", query)
        assert asked, query
        labels = set().union(*(names[name] for name in asked))
        used = re.findall(r"(\w+)\s*=~?\"", query) + re.findall(r"by \((\w+)", query)
        assert set(used) <= labels, query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
