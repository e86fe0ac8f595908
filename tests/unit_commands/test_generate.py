"""`fsl-node generate` prints what a run's model or an export writes."""

from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from asking import ask, printed
from tuned_runs import adapted, make_run, make_versions, write_base

from fsl_async.commands import export, generate
from fsl_async.config.load import load
from fsl_async.errors import ConfigError, RunDirError, UsageError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.tools import generation
from fsl_async.tools.generation import Bytes, Sampling
from fsl_async.tools.kept_run import KeptRun

# peft calls what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

SHAPE = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
CONFIG = GPTConfig(1, 16, 2, 16)
TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def written(*arguments):
    """Return the text, without streaming."""
    return ask(generate.command, *arguments)[-1]["text"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of random weights, whose tokenizer has a chat format."""
    return write_base(tmp_path_factory.mktemp("bases") / "llama", "llama", TEMPLATE)


@pytest.fixture
def gpt_run(tmp_path):
    """A run of the built-in GPT."""
    make_versions(tmp_path / "run", ModelWeights(GPT(CONFIG, seed=3)), load(None, SHAPE))
    return tmp_path / "run"


def greedy(model, ids, count):
    """The likeliest tokens, computed without a cache."""
    made = list(ids)
    with torch.no_grad():
        for _ in range(count):
            made.append(int(model(input_ids=torch.tensor([made])).logits[0, -1].argmax()))
    return made[len(ids) :]


def shown(tokens):
    """Bytes as text, without the special token 0."""
    return bytes(one for one in tokens if one).decode("utf-8", "replace")


def test_a_run_its_export_and_its_merge_write_the_same(tmp_path, base):
    """And that is what plain transformers writes, in the chat format of the tokenizer."""
    tune = make_run(tmp_path / "run", base, "tune.rank=2")
    printed(export.command, tmp_path / "run", tmp_path / "adapter")
    printed(export.command, tmp_path / "run", tmp_path / "whole", "--merged", "--base", base)
    how = ["--prompt", "hé", "--tokens", 20, "--temperature", 0]
    texts = [
        written(tmp_path / "run", "--base", base, *how),
        written(tmp_path / "adapter", "--base", base, *how),
        written(tmp_path / "whole", *how),
    ]
    model, weights, _ = adapted(base, tune)
    weights.copy_in(KeptRun(tmp_path / "run").chosen(None).vector)
    expected = shown(greedy(model.eval(), "<user>hé<a>".encode(), 20))
    assert texts == [expected] * 3
    assert written(tmp_path / "whole", *how, "--raw") == shown(greedy(model, "hé".encode(), 20))
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "whole"))
    assert shown(greedy(plain.eval(), "<user>hé<a>".encode(), 20)) == expected
    older = written(tmp_path / "run", "--base", base, *how, "--version", 0)
    original = transformers.AutoModelForCausalLM.from_pretrained(str(base))
    assert older == shown(greedy(original.eval(), "<user>hé<a>".encode(), 20))
    assert isinstance(peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")), peft.LoraConfig)


def test_the_built_in_gpt_writes_bytes(gpt_run, tmp_path):
    """Beyond its context too, and as its export does within it."""
    model = GPT(CONFIG)
    ModelWeights(model).copy_in(KeptRun(gpt_run).chosen(None).vector)
    ids = list(b"ab")
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(model(torch.tensor([ids[-16:]]))[0, -1].argmax()))
    how = ["--prompt", "ab", "--temperature", 0]
    assert written(gpt_run, *how, "--tokens", 40) == bytes(ids[2:]).decode("utf-8", "replace")
    printed(export.command, gpt_run, tmp_path / "out")
    assert written(tmp_path / "out", *how, "--tokens", 14) == written(gpt_run, *how, "--tokens", 14)
    assert written(tmp_path / "out", *how, "--tokens", 99) == written(
        gpt_run, *how, "--tokens", 14
    ), "it ends where the model has no more positions"


def test_seed_and_temperature_decide(gpt_run):
    """The same seed writes the same text."""
    how = ["--prompt", "", "--tokens", 30, "--temperature", 1.0]
    texts = [written(gpt_run, *how, "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


class Fixed(torch.nn.Module):
    """Writes given bytes, whatever comes before."""

    def __init__(self, data):
        super().__init__()
        self.config = CONFIG
        self.rest = list(data)

    def forward(self, ids):
        """Logits of the next byte."""
        found = torch.zeros(1, ids.shape[1], 256)
        found[0, -1, self.rest.pop(0)] = 1.0
        return found


def test_characters_come_whole_and_do_not_act_on_the_terminal(gpt_run, monkeypatch):
    """Control characters are escaped, but for line breaks and tabs; bytes of no character become
    U+FFFD.
    """
    data = "é\x1b[2J\n\t\u202e✓".encode() + b"\xff!\xe2\x82"
    pieces = list(Bytes(Fixed(data)).pieces("x", Sampling(len(data), 0.0, 0), raw=False))
    assert "".join(pieces) == "é\x1b[2J\n\t\u202e✓\ufffd!\ufffd"
    assert "é" in pieces
    assert "✓" in pieces, "never half a character"
    monkeypatch.setattr(generation, "GPT", lambda _: Fixed(data))
    monkeypatch.setattr(generation, "ModelWeights", lambda _: SimpleNamespace(copy_in=len))
    how = ["--prompt", "x", "--tokens", len(data), "--temperature", 0]
    out = printed(generate.command, gpt_run, *how)
    assert out == "é\\u001b[2J\n\t\\u202e✓\ufffd!\ufffd\n"


def test_wrong_calls_are_one_line(tmp_path, base, gpt_run):
    """Each says what to do."""
    make_run(tmp_path / "tuned", base, "tune.rank=2")
    labels = ["tune.objective=classify", "tune.labels=a,b"]
    make_run(tmp_path / "labels", base, "tune.rank=2", *labels)
    printed(export.command, tmp_path / "tuned", tmp_path / "adapter")
    printed(export.command, tmp_path / "labels", tmp_path / "classifier")
    wrong = [
        (tmp_path / "tuned", UsageError, "tunes a base model: give --base"),
        (tmp_path / "labels", UsageError, "its model writes no text"),
        (tmp_path / "classifier", UsageError, "classifier classifies: its model writes no text"),
        (tmp_path / "adapter", UsageError, "holds adapters only: give --base"),
        (tmp_path, RunDirError, "neither a run directory with a ledger nor an export"),
    ]
    for source, kind, text in wrong:
        with pytest.raises(kind, match=text):
            written(source, "--prompt", "x")
    with pytest.raises(UsageError, match="leave out --version"):
        written(tmp_path / "adapter", "--prompt", "x", "--version", 1)
    with pytest.raises(RunDirError, match="does not keep version 9"):
        written(gpt_run, "--prompt", "x", "--version", 9)
    other = write_base(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match="does not fit base"):
        written(tmp_path / "adapter", "--prompt", "x", "--base", other)
