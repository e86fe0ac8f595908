"""`fsl-node export` writes folders that plain peft and transformers load, with equal logits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from asking import ask
from safetensors.torch import load_file
from tuned_runs import adapted, logits_of, make_run, make_versions, write_base

from fsl_async.commands import export
from fsl_async.config.load import load
from fsl_async.errors import ConfigError, RunDirError, TaskError, UsageError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.tools.kept_run import KeptRun

# peft calls what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

EXACT = {"rtol": 1e-5, "atol": 1e-5}
SHAPE = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=16"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Bases by kind, each written once."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(kind):
        if kind not in made:
            made[kind] = write_base(folder / kind, kind)
        return made[kind]

    return base


def run_export(*arguments):
    """Return the object that the command prints."""
    return ask(export.command, *arguments)[-1]


def ours(run_dir, base, tune, version=None, site_rank=None):
    """Logits of our own model with a version's weights."""
    model, weights, _ = adapted(base, tune, site_rank)
    weights.copy_in(KeptRun(run_dir).chosen(version).vector)
    return logits_of(model)


def plain_base(base, tune):
    """The base as any program loads it."""
    if tune.objective == "classify":
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            str(base), num_labels=len(tune.label_names), ignore_mismatched_sizes=True
        )
    return transformers.AutoModelForCausalLM.from_pretrained(str(base))


CASES = {
    "llama": ("llama", ["tune.rank=3", "tune.scale=1.5"]),
    "named layers": ("llama", ["tune.targets=q_proj,v_proj", "tune.scale=0.3"]),
    "bank": ("llama", ["tune.rule=bank", "tune.rank=4"]),
    "ffa": ("llama", ["tune.rule=ffa"]),
    "norms": ("llama", ["tune.full=*norm.weight"]),
    "gpt2": ("gpt2", []),
    "gpt2 ffa": ("gpt2", ["tune.rule=ffa", "tune.targets=c_attn"]),
    "head of a decoder": ("llama", ["tune.objective=classify", "tune.labels=a,b,c"]),
    "head of an encoder": ("bert", ["tune.objective=classify", "tune.labels=a,b,c"]),
}


@pytest.mark.parametrize(("kind", "settings"), CASES.values(), ids=CASES)
def test_peft_computes_what_the_run_does(tmp_path, bases, kind, settings):
    """The adapters matter, and are those of the version."""
    base = bases(kind)
    tune = make_run(tmp_path / "run", base, *settings)
    found = run_export(tmp_path / "run", tmp_path / "out", "--base", base)
    assert (found["version"], found["kind"]) == (2, "a PEFT folder")
    torch.manual_seed(77)  # a head that is not in the folder would be drawn
    plain = plain_base(base, tune)
    before = logits_of(plain)
    model = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    expected = ours(tmp_path / "run", base, tune)
    torch.testing.assert_close(logits_of(model), expected, **EXACT)
    assert (expected - before).abs().max() > 0.01
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    plain_names = {
        name.removeprefix("base_model.model."): part for name, part in model.named_modules()
    }
    adapters = {name for name, part in plain_names.items() if hasattr(part, "lora_A")}
    assert adapters == set(config["target_modules"])
    whole = {
        name for name, part in plain_names.items() if type(part).__name__ == "ModulesToSaveWrapper"
    }
    assert whole == set(config["modules_to_save"] or ())
    assert bool(whole) == (tune.objective == "classify" or bool(tune.full))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rule", ["fedit", "ffa", "fedex", "flora", "bank"])
def test_a_merged_folder_needs_no_peft(tmp_path, bases, kind, rule):
    """Adapters and patches are in the weights, and the tokenizer is there."""
    base = bases(kind)
    tune = make_run(tmp_path / "run", base, f"tune.rule={rule}", "tune.rank=2")
    run_export(tmp_path / "run", tmp_path / "out", "--merged", "--base", base)
    model = plain_base(tmp_path / "out", tune)
    assert not any("lora" in name for name in model.state_dict())
    expected = ours(tmp_path / "run", base, tune)
    torch.testing.assert_close(logits_of(model), expected, **EXACT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert tokenizer("aé")["input_ids"] == list("aé".encode())


def test_a_merged_classifier_has_head_and_labels(tmp_path, bases):
    """It predicts names."""
    base = bases("bert")
    tune = make_run(
        tmp_path / "run",
        base,
        "tune.objective=classify",
        "tune.labels=no,yes",
        "tune.full=*LayerNorm*",
    )
    run_export(tmp_path / "run", tmp_path / "out", "--merged", "--base", base)
    model = plain_base(tmp_path / "out", tune)
    assert model.config.id2label == {0: "no", 1: "yes"}
    torch.testing.assert_close(logits_of(model), ours(tmp_path / "run", base, tune), **EXACT)


def test_a_bank_is_that_of_sites_of_any_rank(tmp_path, bases):
    """Sites of a smaller rank hold the other directions too."""
    base = bases("llama")
    tune = make_run(tmp_path / "run", base, "tune.rule=bank", "tune.rank=4")
    run_export(tmp_path / "run", tmp_path / "out", "--version", 1)
    model = peft.PeftModel.from_pretrained(plain_base(base, tune), str(tmp_path / "out"))
    expected = ours(tmp_path / "run", base, tune, version=1, site_rank=1)
    torch.testing.assert_close(logits_of(model), expected, **EXACT)


def test_wrong_calls_are_one_line_and_write_nothing(tmp_path, bases):
    """Each says what to do."""
    base = bases("llama")
    run_dir, out = tmp_path / "run", tmp_path / "out"
    make_run(run_dir, base, "tune.rule=fedex", "tune.rank=2")
    with pytest.raises(UsageError, match=r"fedex changes the base's own weights.*--merged"):
        run_export(run_dir, out)
    with pytest.raises(UsageError, match="--merged needs --base"):
        run_export(run_dir, out, "--merged")
    with pytest.raises(RunDirError, match=r"does not keep version 9; it has \[0, 1, 2\]"):
        run_export(run_dir, out, "--version", 9)
    with pytest.raises(RunDirError, match="has no ledger"):
        run_export(tmp_path, out)
    with pytest.raises(ConfigError, match="is another model than the run's base"):
        run_export(run_dir, out, "--merged", "--base", bases("gpt2"))
    make_run(tmp_path / "ffa", base, "tune.rule=ffa")
    with pytest.raises(UsageError, match="ffa never sends factors A: give --base"):
        run_export(tmp_path / "ffa", out)
    assert not out.exists()
    assert {one.name for one in tmp_path.iterdir()} == {"run", "ffa"}, "no folder is left"


def test_a_base_with_other_values_is_refused(tmp_path, bases):
    """Adapters in another base compute nothing of use."""
    run_dir = tmp_path / "run"
    make_run(run_dir, bases("llama"))
    other = tmp_path / "other"
    model = plain_base(bases("llama"), load(None, []).tune)
    with torch.no_grad():
        model.model.norm.weight[0] += 0.01
    model.save_pretrained(str(other))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((bases("llama") / name).read_bytes())
    with pytest.raises(ConfigError, match="has other weights than the run's base"):
        run_export(run_dir, tmp_path / "out", "--merged", "--base", other)


def test_a_base_in_bf16_is_the_sites(tmp_path, bases):
    """Sites with CUDA hold it rounded, and the digest of what is frozen is of that."""
    rounded, run_dir = tmp_path / "rounded", tmp_path / "run"
    model = plain_base(bases("llama"), load(None, []).tune).bfloat16()
    model.save_pretrained(str(rounded))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (rounded / name).write_bytes((bases("llama") / name).read_bytes())
    tune = make_run(run_dir, rounded)
    run_export(run_dir, tmp_path / "out", "--merged", "--base", bases("llama"))
    torch.testing.assert_close(
        logits_of(plain_base(tmp_path / "out", tune)), ours(run_dir, rounded, tune),
        **EXACT,
    )  # fmt: skip


def test_a_folder_with_files_is_left_alone(tmp_path, bases):
    """Nothing is overwritten; an empty folder is used."""
    make_run(tmp_path / "run", bases("llama"))
    out = tmp_path / "out"
    out.mkdir()
    run_export(tmp_path / "run", out)
    before = {one.name: one.read_bytes() for one in out.iterdir()}
    with pytest.raises(UsageError, match="is not empty: give a new folder"):
        run_export(tmp_path / "run", out, "--version", 0)
    assert {one.name: one.read_bytes() for one in out.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        run_export(tmp_path / "run", tmp_path / "file")


def test_the_built_in_gpt_is_a_hugging_face_model(tmp_path):
    """Plain transformers computes the same, and its tokenizer gives bytes."""
    sizes = GPTConfig(2, 16, 2, 16)
    model = GPT(sizes, seed=3)
    weights = ModelWeights(model)
    make_versions(tmp_path / "run", weights, load(None, SHAPE))
    found = run_export(tmp_path / "run", tmp_path / "out")
    assert "ArceeForCausalLM" in found["kind"]
    weights.copy_in(KeptRun(tmp_path / "run").chosen(None).vector)
    other = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    ids = torch.arange(32).reshape(2, 16) * 41 % 256
    with torch.no_grad():
        expected = model.eval()(ids)
        torch.testing.assert_close(other.eval()(input_ids=ids).logits, expected, **EXACT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    data = bytes(range(256)).decode("latin-1")
    assert tokenizer(data)["input_ids"] == list(data.encode())
    assert tokenizer.decode(list(data.encode())) == data
    with pytest.raises(UsageError, match="tunes no base model"):
        run_export(tmp_path / "run", tmp_path / "other", "--merged")


def test_the_lines_of_the_readme_load_a_checkpoint(tmp_path):
    """A version needs no export to be read: its file has the model's own names."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (lines,) = [
        one for one in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "load_file" in one
    ]
    assert len(lines.splitlines()) == 2
    trained, model = GPT(GPTConfig(2, 16, 2, 16), seed=3), GPT(GPTConfig(2, 16, 2, 16), seed=4)
    weights = ModelWeights(trained)
    make_versions(tmp_path, weights, load(None, SHAPE))
    weights.copy_in(KeptRun(tmp_path).chosen(2).vector)
    exec(
        lines.replace("runs/run", str(tmp_path)).replace("v00000012", "v00000002"), {"model": model}
    )
    ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), trained.eval()(ids))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "opt"])
def test_a_familys_model_is_a_hugging_face_model(tmp_path, family):
    """The names are those of transformers."""
    from fsl_async.learn.data.facts import Facts
    from fsl_async.learn.models.families import build_model

    config = load(None, [*SHAPE, f"model.family={family}"])
    model = build_model(config, Facts((16,), 100, language=True))
    weights = ModelWeights(model)
    make_versions(tmp_path / "run", weights, config)
    assert f"({family})" in run_export(tmp_path / "run", tmp_path / "out")["kind"]
    weights.copy_in(KeptRun(tmp_path / "run").chosen(None).vector)
    other = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    ids = torch.arange(32).reshape(2, 16) * 41 % 100
    with torch.no_grad():
        torch.testing.assert_close(
            other.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits, **EXACT
        )


@pytest.mark.parametrize("family", ["gpt", "llama", "resnet18"])
def test_other_models_are_tensors_by_name(tmp_path, family):
    """One's own model, and parts of a model."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    weights = ModelWeights(model)
    make_versions(tmp_path / "run", weights, load(None, [f"model.family={family}"]))
    assert "tensors by name" in run_export(tmp_path / "run", tmp_path / "out")["kind"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    model.load_state_dict(tensors, strict=False)
    read = np.empty(weights.manifest.values, np.float32)
    weights.copy_out(read)
    np.testing.assert_array_equal(read, KeptRun(tmp_path / "run").chosen(None).vector)
    note = json.loads((tmp_path / "out" / "fsl_export.json").read_text())
    assert note["tensors"]["0.weight"] == [4, 3]
    assert note["version"] == 2


OWN_MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

def recalibrated():
    batches = [torch.randn(32, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    return model(), batches

def other():
    return nn.Linear(3, 4), []

def wrong():
    return model()

def fails():
    raise ValueError("no images here")

def narrow():
    return model(), [torch.ones(2, 2)]
"""


@pytest.mark.parametrize("buffers", ["average", "none"])
def test_statistics_are_measured_on_the_version(tmp_path, buffers):
    """A mean of clients' statistics is not that of the merged weights."""
    own = tmp_path / "own.py"
    own.write_text(OWN_MODEL)
    spec = {}
    exec(OWN_MODEL, spec)
    model, batches = spec["recalibrated"]()
    weights = ModelWeights(model, buffers=buffers)
    make_versions(tmp_path / "run", weights, load(None, [f"exchange.buffers={buffers}"]))
    option = "--recalibrate"
    found = run_export(tmp_path / "run", tmp_path / "out", option, f"{own}:recalibrated")
    assert "batch norm measured over 4 batches" in found["kind"]
    weights.copy_in(KeptRun(tmp_path / "run").chosen(None).vector)
    torch.optim.swa_utils.update_bn(batches, model)
    expected = model.state_dict()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(expected) - set(tensors) == {"1.num_batches_tracked"}
    for name, one in tensors.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-6, atol=1e-6)
    make_versions(tmp_path / "part", ModelWeights(model, ["1.*"]), load(None, []))  # exchange=
    found = run_export(tmp_path / "part", tmp_path / "some", option, f"{own}:recalibrated")
    assert "batch norm measured over 4 batches" in found["kind"]
    for function, says in (
        ("other", "another model than the run's: tensor"),
        ("wrong", r"must return \(model, batches\)"),
        ("fails", "raised ValueError: no images here"),
        ("narrow", "the model does not take a batch: RuntimeError"),
    ):
        with pytest.raises(TaskError, match=says):
            run_export(tmp_path / "run", tmp_path / "no", option, f"{own}:{function}")
        assert not (tmp_path / "no").exists()


def test_modules_that_peft_cannot_hold_are_refused(tmp_path, bases):
    """It would load no bias, and leave an output layer as it was; a merged folder has both."""
    base = bases("gpt2")
    wrong = {
        "*ln_f.weight": r"a part of transformer\.ln_f, without transformer\.ln_f\.bias.*--merged",
        "*wte.weight": r"transformer\.wte\.weight, .*is the output layer too.*--merged",
    }
    for number, (pattern, problem) in enumerate(wrong.items()):
        run_dir, out = tmp_path / f"run{number}", tmp_path / f"out{number}"
        tune = make_run(run_dir, base, "tune.rank=2", f"tune.full={pattern}")
        with pytest.raises(TaskError, match=problem):
            run_export(run_dir, out, "--base", base)
        with pytest.raises(UsageError, match=r"trains whole modules .*give --base"):
            run_export(run_dir, out)
        run_export(run_dir, out, "--merged", "--base", base)
        expected = ours(run_dir, base, tune)
        torch.testing.assert_close(logits_of(plain_base(out, tune)), expected, **EXACT)


def test_adapters_are_exported_without_torch(tmp_path, bases):
    """On a machine with the run's directory alone; `--help` needs as little."""
    base = bases("llama")
    make_run(tmp_path / "run", base, "tune.rule=ffa")
    code = (
        "import sys; from fsl_async import cli\n"
        "assert not cli.main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules), 'imported'\n"
    )
    for words in (
        ["export", tmp_path / "run", tmp_path / "out", "--base", base],
        ["export", "--help"],
        ["generate", "--help"],
        ["evaluate", "--help"],
    ):
        subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True, stdout=-1)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_adapters_of_a_script_are_not_exported(tmp_path, bases):
    """Their names and scale are peft's."""
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"])
    config = load(None, ["tune.method=lora"])
    model = transformers.AutoModelForCausalLM.from_pretrained(str(bases("llama")))
    make_versions(tmp_path / "run", ModelWeights(peft.get_peft_model(model, settings)), config)
    with pytest.raises(RunDirError, match="save them in the script"):
        run_export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
