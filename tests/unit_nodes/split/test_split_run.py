"""Complete runs of split learning on text: over sockets they compute what one process does."""

import pytest
from split_lockstep import check_equal

from fsl_async.config.load import load
from fsl_async.errors import ConfigError
from fsl_async.nodes.split_server import node as node_server
from fsl_async.process.stopper import Stopper

LOCKSTEP = ("split.mode=lockstep", "split.optimizer=sgd", "train.learning_rate=0.1")


@pytest.mark.parametrize("method", ["sl", "splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage"])
def test_a_run_in_lockstep_is_the_computation_in_one_process(method, nodes, configured, text):
    """The network must not change the result: the same calls in the same order."""
    rounds = 4 if method == "sl" else 3  # a round of a relay is one client's turn
    chosen = (f"split.method={method}", f"data.path={text}", f"run.rounds={rounds}")
    config = configured(*chosen, *LOCKSTEP)
    check_equal(nodes(config), config, rtol=1e-6, atol=0)


def test_labels_stay_at_home_in_a_u_shape(nodes, configured, text):
    """A step crosses the cut twice without labels, and equals the computation in one process."""
    chosen = ("split.method=splitfed-v2", "split.labels_at_home=true", "run.rounds=2")
    config = configured(*chosen, f"data.path={text}", *LOCKSTEP)
    run = nodes(config)
    check_equal(run, config, rtol=1e-6, atol=0)
    assert "labels up" not in run.summaries["server"].traffic["payload"]


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
