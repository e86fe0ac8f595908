"""Servers that want more of a site than it lets out, against real clients.

And what a server learns in a run that is allowed.
"""

import time

import attrs
import pytest

from fsl_async.cluster.relauncher import Relauncher
from fsl_async.config.load import from_wire, load, to_wire
from fsl_async.config.site_policy import SitePolicy
from fsl_async.nodes.ps import node as node_ps
from fsl_async.observe.journal import JournalReader

SECRET = "-----BEGIN PRIVATE KEY----- " + "MC4CAQAwBQYDK2VwBCIEIJ" * 60


def lines_of(run_dir):
    """The lines of a server's journal."""
    return list(JournalReader(run_dir / "journal.jsonl").read_all())


@pytest.fixture
def secret(tmp_path):
    """A file of the client's that no run was given."""
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

        monkeypatch.setattr(node_ps, "to_wire", welcome)

    return make


class TestLocalFiles:
    """Nothing that names a local path, file or code comes from another node."""

    def test_a_welcome_names_no_path_and_no_file(self):
        """What the operator typed at the server is the server's own."""
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
        told = from_wire(wire)
        assert (told.train.task, told.model.family, told.split.auxiliary) == ("own", "own", "own")

    def test_a_welcome_that_names_them_all_the_same_is_not_believed(self):
        """A server that is hostile sends what it likes."""
        wire = to_wire(load(None))
        wire["data"]["path"] = "/etc/passwd"
        wire["train"]["task"] = "/home/a/evil.py:f"
        wire["model"]["family"] = "/home/a/evil.py:f"
        told = from_wire(wire)
        assert told.data.path == ""
        assert (told.train.task, told.model.family) == ("own", "own")

    @pytest.mark.parametrize("method", ["none", "cse-fsl"])
    def test_a_client_without_data_reads_no_file_of_a_servers_choice(
        self, nodes, configured, secret, hostile_welcome, method
    ):
        """As attacked: a private key arrived at the server as labels, or shaped the deltas."""
        hostile_welcome(("data", "path", str(secret)))
        config = configured(
            f"split.method={method}", "sync.every_s=0.3", "data.source=site", clients=1
        )
        run = nodes(config, names=("site-a",), failing=True)
        assert "give this client --data PATH" in str(run.errors["site-a"])
        assert run.errors["site-a"].exit_code == 2

    def test_the_built_in_text_is_read_where_the_run_says_so(
        self, nodes, configured, secret, hostile_welcome, monkeypatch
    ):
        """And then it is that text, whatever path comes along."""
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
        """A task reads fed.config: what is there was checked."""
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
    """The site decides."""

    @pytest.mark.parametrize("method", ["sl", "splitfed-v2", "cse-fsl", "fsl-sage"])
    def test_a_split_method_gets_no_label_of_a_site_that_came_to_pretrain(
        self, nodes, configured, text, tmp_path, method
    ):
        """As attacked: a server with a split method got text as labels from a pretraining site."""
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
            if line["type"] in {"upload_offered", "admit_split"}
        ]
        assert offered == []

    def test_a_welcome_that_widens_a_run_under_way_ends_it(self):
        """A server may be started again with other settings, or lie the second time only."""
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
        """It trained on, and ended when the first batch was to be sent."""
        config = configured("split.method=fedavg", f"data.path={text}", clients=1)
        hostile_welcome(("split", "server", "ipc:///tmp/x"), ("split", "method", "sl"))
        run = nodes(config, names=("site-a",), failing=True)
        assert "the parameter server's configuration: " in str(run.errors["site-a"])
        assert not any("trains on" in line for line in run.lines)

    def test_a_task_of_ones_own_sends_no_labels_either(self, nodes, configured, text, tmp_path):
        """The last gate is where labels are packed.

        Rules that say labels stay do not help a method that sends them.
        """
        from fsl_async.learn.split import remote

        training = object.__new__(remote.SplitTraining)
        training._options = remote.TrainingOptions(4, labels_stay=True)
        import torch

        from fsl_async.learn.split.smashed import Smashed

        with pytest.raises(Exception, match="keeps labels here"):
            training._payload(Smashed(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None))

    @pytest.mark.parametrize("allowed", [False, True])
    def test_metrics_leave_where_they_are_allowed(self, nodes, configured, text, tmp_path, allowed):
        """The loss on private text is data too.

        Neither deltas nor heartbeats nor the rounds of split learning carry it unasked.
        """
        kinds = {"deltas", *({"metrics"} if allowed else ())}
        config = configured(
            "split.method=none", f"data.path={text}", "run.rounds=3", "sync.every_s=0.7", clients=1
        )
        config = attrs.evolve(config, session=attrs.evolve(config.session, heartbeat_every_s=0.2))
        run = nodes(config, names=("site-a",), policy=SitePolicy(frozenset(kinds)))
        lines = lines_of(tmp_path / "run")
        offered = [line["delta"]["metrics"] for line in lines if line["type"] == "delta_offered"]
        beats = [line["payload"] for line in lines if line["type"] == "heartbeat_received"]
        assert offered
        assert beats
        assert all(("loss" in metrics) == allowed for metrics in offered)
        assert any("loss" in beat for beat in beats) == allowed
        assert any("step" in beat for beat in beats)
        said = [line for line in run.lines if line.startswith("leaves this machine: ")]
        assert len(said) == 1
        assert ("metrics such as the loss stay here" in said[0]) != allowed

    def test_split_rounds_carry_coding_errors_only_as_metrics(
        self, nodes, configured, text, tmp_path
    ):
        """They are statistics of activations."""
        kinds = frozenset({"deltas", "activations", "labels"})
        config = configured("split.method=cse-fsl", f"data.path={text}", "split.up=bf16", clients=1)
        nodes(config, names=("site-a",), policy=SitePolicy(kinds))
        done = [
            line
            for line in lines_of(tmp_path / "run" / "server")
            if line["type"] == "round_done_received"
        ]
        assert done
        assert all(line["errors"] == {} for line in done)

    @pytest.mark.parametrize("method", ["none", "cse-fsl"])
    def test_the_text_of_an_exception_stays_here(
        self, nodes, configured, text, tmp_path, *, monkeypatch, method
    ):
        """An error such as could not convert string to float: 'Jane Doe' quotes data.

        Servers hear that training failed.
        """
        told = []
        monkeypatch.setattr(
            Relauncher, "left", lambda _, name, reason, words: told.append((reason, words))
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
        assert told == [("bye", "its training failed; the log at the client has the error")]
        assert not any("Jane Doe" in path.read_text() for path in journals)

    def test_adapters_alone_let_no_other_tensor_out(self, nodes, configured, text, tmp_path):
        """A configuration that says LoRA says nothing about what a task attaches."""
        task = tmp_path / "task.py"
        task.write_text("import torch\ndef train(fed):\n    fed.attach(torch.nn.Linear(3, 2))\n")
        config = configured(
            "split.method=fedavg", "split.lora_client=2", f"data.path={text}", clients=1
        )
        policy = SitePolicy(frozenset({"adapters"}))
        run = nodes(config, names=("site-a",), task=f"{task}:train", policy=policy, failing=True)
        assert "exchanges weight, which is no LoRA adapter" in str(run.errors["site-a"])
        kinds = {line["type"] for line in lines_of(tmp_path / "run")}
        assert "initial_offered" not in kinds
        assert "model_attached" not in kinds

    def test_adapters_alone_are_enough_for_lora(self, nodes, configured, text):
        """What is exchanged then are adapters."""
        pytest.importorskip("peft")
        config = configured(
            "split.method=fedavg", "split.lora_client=2", f"data.path={text}", clients=1
        )
        nodes(config, names=("site-a",), policy=SitePolicy(frozenset({"adapters"})))
