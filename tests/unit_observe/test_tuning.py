"""Ranks, labels and norms of sites, as status shows them."""

import pytest

from fsl_async.observe.clients import ClientState
from fsl_async.observe.rounds import saw_delta, site_lines


def test_a_site_of_one_class_is_named_once():
    """Label shares come with metrics; the warning has the site, the share and the label."""
    client = ClientState("site-b")
    delta = {
        "facts": {"rank": 2.0, "order": 1.0, "other": 3.0},
        "metrics": {"loss": 0.5, "share_negative": 0.98, "share_positive": 0.02},
    }
    assert "site-b has 98% negative among its records" in saw_delta(client, delta)
    assert saw_delta(client, delta) == ""
    assert client.facts == {"rank": 2.0, "order": 1.0}
    assert client.loss is None
    client.product_norm = 1.25
    assert site_lines([client, ClientState("quiet")]) == [
        "site-b: rank 2, moves products by 1.25, 98% negative, 2% positive"
    ]


@pytest.mark.parametrize("facts", [{"rank": True}, {"rank": "4"}, {"rank": None}, {}])
def test_a_peer_may_report_anything(facts):
    """What is no number is left out."""
    client = ClientState("a")
    assert saw_delta(client, {"facts": facts, "metrics": {"share_x": "much"}}) == ""
    assert site_lines([client]) == []


def test_zeroth_order_is_shown():
    """An operator sees which sites compute no gradients."""
    client = ClientState("a")
    saw_delta(client, {"facts": {"rank": 4.0, "order": 0.0}})
    assert site_lines([client]) == ["a: rank 4, zeroth order"]
