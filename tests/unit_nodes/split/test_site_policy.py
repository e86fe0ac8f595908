"""Runs that need more data of a site than its policy allows, with real clients.

Also the data that a parameter server gets in an allowed run.
"""

import time

import attrs
import pytest

from fsl_async.cluster.relauncher import Relauncher
from fsl_async.config.load import from_wire, load, to_wire
from fsl_async.config.site_policy import SitePolicy
from fsl_async.nodes.ps import shell as shell_ps
from fsl_async.observe.journal import JournalReader

SECRET = "-----BEGIN PRIVATE KEY----- " + "MC4CAQAwBQYDK2VwBCIEIJ" * 60


def lines_of(run_dir):
    """The lines of a parameter server's journal."""
    return list(JournalReader(run_dir / "journal.jsonl").read_all())


@pytest.fixture
def secret(tmp_path):
    """A file at the client that is not part of a run."""
    path = tmp_path / "id_ed25519"
    path.write_text(SECRET)
    return path


@pytest.fixture
def hostile_welcome(monkeypatch):
    """(table, key, value, ...) -> a parameter server with these in its welcome."""

    def make(*settings):
        def welcome(config):
            wire = to_wire(config)
            for table, key, value in settings:
                wire[table][key] = value
            return wire

        monkeypatch.setattr(shell_ps, "to_wire", welcome)

    return make


class TestLocalFiles:
    """No other node chooses a path, a file or code of a client."""

    def test_a_welcome_names_no_path_and_no_file(self):
        """The parameter server's own paths and files are not sent."""
        config = load(
            None,
            [
                "data.path=/srv/text",
                "train.task=/srv/a.py:f",
                "model.family=/srv/b.py:f",
                "split.auxiliary=/srv/c.py:f",
            ],
        )
        wire = to_wire(config)
        assert "/srv" not in str(wire)
        assert "path" not in wire["data"]
        received = from_wire(wire)
        assert (received.train.task, received.model.family, received.split.auxiliary) == (
            "own",
            "own",
            "own",
        )

    def test_paths_and_files_in_a_hostile_welcome_are_ignored(self):
        """A hostile parameter server may send any welcome."""
        wire = to_wire(load(None))
        wire["data"]["path"] = "/etc/passwd"
        wire["train"]["task"] = "/home/a/evil.py:f"
        wire["model"]["family"] = "/home/a/evil.py:f"
        received = from_wire(wire)
        assert received.data.path == ""
        assert (received.train.task, received.model.family) == ("own", "own")

    @pytest.mark.parametrize("method", ["none", "cse-fsl"])
    def test_a_client_without_data_reads_no_file_named_in_a_welcome(
        self, nodes, configured, secret, hostile_welcome, method
    ):
        """Otherwise a private key could reach the split server as labels, or shape deltas."""
        hostile_welcome(("data", "path", str(secret)))
        config = configured(
            f"split.method={method}", "sync.every_s=0.3", "data.source=site", clients=1
        )
        run = nodes(config, names=("site-a",), failing=True)
        assert "give this client --data PATH" in str(run.errors["site-a"])
        assert run.errors["site-a"].exit_code == 2

    def test_the_built_in_text_is_read_if_the_run_allows_it(
        self, nodes, configured, secret, hostile_welcome, monkeypatch
    ):
        """The path in the welcome is ignored then."""
        from fsl_async.learn.client import pretrain

        opened = []
        found = pretrain.open_corpus
        monkeypatch.setattr(
            pretrain, "open_corpus", lambda *given: opened.append(found(*given)) or opened[-1]
        )
        hostile_welcome(("data", "path", str(secret)))
        config = configured(
            "split.method=none", "sync.every_s=0.3", "data.source=built-in", clients=1
        )
        nodes(config, names=("site-a",))
        assert opened
        assert all(corpus.root.name.startswith("python3") for corpus in opened)

    def test_unknown_tables_of_a_welcome_reach_no_task(
        self, nodes, configured, text, tmp_path, hostile_welcome
    ):
        """A task reads fed.config, which has checked settings only."""
        hostile_welcome(("data", "surprise", "/etc/passwd"), ("train", "batch", 4))
        task = tmp_path / "task.py"
        task.write_text(
            "def train(fed):\n    assert 'surprise' not in fed.config['data'], fed.config\n"
            "    assert fed.config['data']['path'].endswith('text.txt')\n"
        )
        config = configured("split.method=none", f"data.path={text}", "run.seconds=2", clients=1)
        run = nodes(config, names=("site-a",), task=f"{task}:train", failing=True)
        assert run.errors == {}


class TestWhatLeaves:
    """The site's policy decides what leaves."""

    @pytest.mark.parametrize("method", ["sl", "splitfed-v2", "cse-fsl", "fsl-sage"])
    def test_a_split_method_gets_no_label_of_a_site_that_allows_deltas_only(
        self, nodes, configured, text, tmp_path, method
    ):
        """A run with a split method would get text as labels from a pretraining site."""
        config = configured(f"split.method={method}", f"data.path={text}", clients=1)
        run = nodes(config, names=("site-a",), policy=SitePolicy(), failing=True)
        refused = run.errors["site-a"]
        assert refused.exit_code == 2
        assert "needs activations and labels sent to the split server at tcp://127.0.0.1:" in str(
            refused
        )
        assert "--allow deltas,activations,labels" in str(refused)
        assert lines_of(tmp_path / "run" / "server")
        offered = [
            line
            for line in lines_of(tmp_path / "run" / "server")
            if line["type"] in {"smashed_meta", "admit_split"}
        ]
        assert offered == []

    def test_a_later_welcome_that_needs_more_data_ends_the_client(self):
        """A parameter server may be restarted with other settings."""
        from fsl_async.nodes.client.node import ClientRuntime
        from fsl_async.nodes.client.parts import ClientOptions
        from fsl_async.nodes.wire import Welcome
        from fsl_async.process.stopper import Stopper

        stop = Stopper()
        runtime = ClientRuntime(ClientOptions("127.0.0.1:9", "a"), stop=stop, log=lambda _: None)
        try:
            while runtime._node is None:
                time.sleep(0.01)
            first = load(None)
            runtime._node._check_policy(Welcome("r", 0, 1, to_wire(first)), first)
            second = load(None, ["split.method=sl", "split.server=127.0.0.1:9"])
            with pytest.raises(Exception, match="needs activations and labels"):
                runtime._node._check_policy(Welcome("r", 0, 1, to_wire(second)), second)
        finally:
            stop.request(hard=True)
            runtime.training_ended(None)

    def test_a_split_server_without_an_address_ends_the_client_at_once(
        self, nodes, configured, text, hostile_welcome
    ):
        """The client must not train until the first upload."""
        config = configured("split.method=fedavg", f"data.path={text}", clients=1)
        hostile_welcome(("split", "server", "ipc:///tmp/x"), ("split", "method", "sl"))
        run = nodes(config, names=("site-a",), failing=True)
        assert "the parameter server's configuration: " in str(run.errors["site-a"])
        assert not any("trains on" in line for line in run.lines)

    def test_a_custom_task_sends_no_labels_either(self, nodes, configured, text, tmp_path):
        """The policy is checked again where labels are packed.

        A task may choose a method that sends them.
        """
        from fsl_async.learn.split import remote

        training = object.__new__(remote.SplitTraining)
        training._classes, training._labels_stay = 4, True
        import torch

        from fsl_async.learn.split.smashed import Smashed

        with pytest.raises(Exception, match="keeps labels here"):
            training._payload(Smashed(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None))

    @pytest.mark.parametrize("allowed", [False, True])
    def test_metrics_leave_if_they_are_allowed(self, nodes, configured, text, tmp_path, allowed):
        """The loss on private text is data too.

        Without permission it is not in deltas, heartbeats or rounds of split learning.
        """
        kinds = {"deltas", *({"metrics"} if allowed else ())}
        config = configured(
            "split.method=none", f"data.path={text}", "run.rounds=3", "sync.every_s=0.7", clients=1
        )
        config = attrs.evolve(config, session=attrs.evolve(config.session, heartbeat_every_s=0.2))
        run = nodes(config, names=("site-a",), policy=SitePolicy(frozenset(kinds)))
        lines = lines_of(tmp_path / "run")
        offered = [line["delta"]["metrics"] for line in lines if line["type"] == "delta_meta"]
        beats = [line["payload"] for line in lines if line["type"] == "heartbeat_received"]
        assert offered
        assert beats
        assert all(("loss" in metrics) == allowed for metrics in offered)
        assert any("loss" in beat for beat in beats) == allowed
        assert any("step" in beat for beat in beats)
        lines = [line for line in run.lines if line.startswith("leaves this machine: ")]
        assert len(lines) == 1
        assert ("metrics such as the loss stay here" in lines[0]) != allowed

    def test_split_rounds_carry_coding_errors_only_as_metrics(
        self, nodes, configured, text, tmp_path
    ):
        """They are statistics of activations."""
        kinds = frozenset({"deltas", "activations", "labels"})
        config = configured("split.method=cse-fsl", f"data.path={text}", "split.up=bf16", clients=1)
        nodes(config, names=("site-a",), policy=SitePolicy(kinds))
        done = [
            line for line in lines_of(tmp_path / "run" / "server") if line["type"] == "round_done"
        ]
        assert done
        assert all(line["errors"] == {} for line in done)

    @pytest.mark.parametrize("method", ["none", "cse-fsl"])
    def test_the_text_of_an_exception_stays_here(
        self, nodes, configured, text, tmp_path, *, monkeypatch, method
    ):
        """An error such as "could not convert string to float: 'Jane Doe'" quotes data.

        The other nodes only get that training failed.
        """
        received = []
        monkeypatch.setattr(
            Relauncher, "left", lambda _, name, reason, words: received.append((reason, words))
        )
        task = tmp_path / "task.py"
        begin = (
            "from fsl_async.learn.split.task import begin; begin(fed)" if method != "none" else ""
        )
        task.write_text(
            f"def train(fed):\n    {begin or 'pass'}\n    raise ValueError('Jane Doe')\n"
        )
        config = configured(f"split.method={method}", f"data.path={text}", clients=1)
        run = nodes(config, names=("site-a",), task=f"{task}:train", failing=True)
        assert "Jane Doe" in str(run.errors["site-a"])
        journals = list((tmp_path / "run").rglob("journal.jsonl"))
        assert journals
        assert received == [("bye", "its training failed; the log at the client has the error")]
        assert not any("Jane Doe" in path.read_text() for path in journals)

    def test_with_adapters_only_no_other_tensor_leaves(self, nodes, configured, text, tmp_path):
        """A task may attach other tensors than a LoRA configuration says."""
        task = tmp_path / "task.py"
        task.write_text("import torch\ndef train(fed):\n    fed.attach(torch.nn.Linear(3, 2))\n")
        config = configured(
            "split.method=fedavg", "split.lora_client=2", f"data.path={text}", clients=1
        )
        policy = SitePolicy(frozenset({"adapters"}))
        run = nodes(config, names=("site-a",), task=f"{task}:train", policy=policy, failing=True)
        assert "exchanges weight, which is no LoRA adapter" in str(run.errors["site-a"])
        kinds = {line["type"] for line in lines_of(tmp_path / "run")}
        assert "initial_meta" not in kinds
        assert "model_attached" not in kinds

    def test_adapters_alone_are_enough_for_lora(self, nodes, configured, text):
        """Only adapters are exchanged."""
        pytest.importorskip("peft")
        config = configured(
            "split.method=fedavg", "split.lora_client=2", f"data.path={text}", clients=1
        )
        nodes(config, names=("site-a",), policy=SitePolicy(frozenset({"adapters"})))
