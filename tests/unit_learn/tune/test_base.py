"""Base models from files: weights, new heads, facts, and what is wrong in one line."""

import importlib.util
import json
import re
import shutil
import struct

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from fsl_async.errors import ConfigError, to_install

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base
import transformers

from fsl_async.learn.models.targets import is_head
from fsl_async.learn.tune import base as bases
from fsl_async.learn.tune.base import base_facts, load_base, save_base

LABELS = ("no", "yes")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_base.write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_base.write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")


def heads(base):
    return {name: base.model.state_dict()[name] for name in base.drawn}


def test_weights_are_those_of_the_folder(llama, tmp_path, capsys):
    """In fp32, also from a folder in bf16, and saved and loaded again to the bit."""
    base = load_base(llama, "lm")
    assert (base.drawn, base.context, base.model.training) == ((), tiny_base.POSITIONS, False)
    assert {weight.dtype for weight in base.model.parameters()} == {torch.float32}
    base.model.to(torch.bfloat16)
    save_base(base, tmp_path / "half")
    half = load_base(tmp_path / "half", "lm")
    assert {weight.dtype for weight in half.model.parameters()} == {torch.float32}
    for one, other in zip(base.model.parameters(), half.model.parameters(), strict=True):
        assert torch.equal(one.float(), other)
    assert half.tokenizer("hé")["input_ids"] == base.tokenizer("hé")["input_ids"]
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_new_head_follows_from_the_seed_alone(request, kind, capsys):
    """Sites with other heads would average different functions."""
    folder = request.getfixturevalue(kind)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = load_base(folder, "classify", labels=LABELS, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "the process's own draws are as before"
    torch.manual_seed(6)
    again = heads(load_base(folder, "classify", labels=LABELS, seed=3))
    other = heads(load_base(folder, "classify", labels=LABELS, seed=4))
    assert (
        first.drawn
        == {"llama": ("score.weight",), "bert": ("classifier.bias", "classifier.weight")}[kind]
    )
    for name, weight in heads(first).items():
        assert torch.equal(weight, again[name])
        if name.endswith("bias"):
            assert not weight.any()
        else:
            assert weight.shape == (2, tiny_base.WIDTH)
            assert not torch.equal(weight, other[name])
            assert weight.abs().max() < 0.02 * 3**0.5
            assert weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert "".join(capsys.readouterr()) == "", "the library would print a report"
    assert first.model.config.id2label == {0: "no", 1: "yes"}


def test_the_head_of_the_folder_is_kept_if_it_fits(bert, tmp_path):
    """A classifier that was trained before goes on; for other labels it begins anew."""
    base = load_base(bert, "classify", labels=LABELS)
    with torch.no_grad():
        base.model.classifier.weight.fill_(0.5)
    save_base(base, tmp_path / "trained")
    kept = load_base(tmp_path / "trained", "classify", labels=LABELS)
    assert kept.drawn == ()
    assert (kept.model.classifier.weight == 0.5).all()
    three = load_base(tmp_path / "trained", "classify", labels=("a", "b", "c"))
    assert three.drawn == ("classifier.bias", "classifier.weight")
    assert three.model.classifier.weight.shape == (3, tiny_base.WIDTH)
    assert (three.model.classifier.weight != 0.5).all()


def test_a_decoder_classifies_batches(llama, tmp_path):
    """It refuses batches without an id of padding, and reads each text at its own last token."""
    config = json.loads((llama / "config.json").read_text())
    folder = shutil.copytree(llama, tmp_path / "bare")
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    base = load_base(folder, "classify", labels=LABELS)
    pad, (short, long) = base.tokenizer.pad_token_id, base.tokenizer(["ab", "abcdef"])["input_ids"]
    both = torch.tensor([short + [pad] * (len(long) - len(short)), long])
    with torch.no_grad():
        together = base.model(input_ids=both, attention_mask=(both != pad).long()).logits
        alone = base.model(input_ids=torch.tensor([short])).logits
    assert torch.allclose(together[:1], alone, atol=1e-6)


def write_gpt2(folder):
    config = transformers.GPT2Config(
        vocab_size=260, n_embd=16, n_layer=11, n_head=2, n_positions=32, tie_word_embeddings=False
    )
    with bases.quiet():
        transformers.GPT2LMHeadModel(config).save_pretrained(str(folder))
        tiny_base.tokenizer().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_facts_are_those_of_the_loaded_model(request, kind, tmp_path):
    """The parameter server and the planner see the same layers without building the model."""
    folder = write_gpt2(tmp_path) if kind == "gpt2" else request.getfixturevalue(kind)
    facts = base_facts(folder)
    objective = "classify" if kind == "bert" else "lm"
    base = load_base(folder, objective, labels=LABELS)
    weights = {n: tuple(w.shape) for n, w in base.model.named_parameters() if n not in base.drawn}
    assert dict(facts.shapes) == weights
    assert facts.parameters == sum(np.prod(shape) for shape in weights.values())
    linear = {}
    for name, part in base.model.named_modules():
        if f"{name}.weight" not in weights:
            continue  # a tied or a new head
        if isinstance(part, nn.Linear):
            linear[name] = (part.in_features, part.out_features)
        elif type(part).__name__ == "Conv1D":
            linear[name] = tuple(part.weight.shape)
    assert {one.name: (one.inputs, one.outputs) for one in facts.linear} == linear
    found = [one.name for one in facts.linear if is_head(one.name, facts.trunk)]
    assert found == ["lm_head"] * (kind == "gpt2")
    assert facts.config["model_type"] == kind
    blocks = [int(part) for n in facts.shapes for part in n.split(".") if part.isdigit()]
    assert blocks == sorted(blocks)


def test_weights_in_several_files_are_read(llama, tmp_path):
    """Larger models come in shards, with an index."""
    base = load_base(llama, "lm")
    base.model.save_pretrained(str(tmp_path / "shards"), max_shard_size="50KB")
    base.tokenizer.save_pretrained(str(tmp_path / "shards"))
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 1
    # transformers 4 writes the path that it read into config.json.
    whole, shards = (attrs.evolve(base_facts(path), config={}) for path in (llama, files[0].parent))
    assert shards == whole
    files[-1].unlink()
    with pytest.raises(ConfigError, match=f"lacks {files[-1].name}"):
        load_base(tmp_path / "shards", "lm")


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def short(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def headless(folder):
    """Take one weight of a block out."""
    data = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + size])
    table["other"] = table.pop("model.layers.1.mlp.up_proj.weight")
    header = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + data[8 + size :]
    )


def own_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('this ran')")


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (shutil.rmtree, "is no folder.*nothing is downloaded"),
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), "has no model.safetensors"),
        (remove("tokenizer.json"), "has no tokenizer"),
        (pickled, "pytorch_model.bin, a pickle"),
        (short, "is short or damaged"),
        (headless, r"lacks the weights model.layers.1.mlp.up_proj.weight"),
        (own_code, "cannot be loaded"),
        (write("config.json", b"[1]"), "config.json' is damaged"),
        (write("config.json", b"{"), "config.json' is damaged"),
        (write("config.json", b"{}"), "cannot be loaded"),
        (write("model.safetensors", b""), "is damaged"),
        (write("model.safetensors", b"\xff" * 8 + b"{}"), "is short or damaged"),
        (write("model.safetensors", b"\x02" + bytes(7) + b"[]"), "is damaged"),
        (write("tokenizer.json", b"{"), "cannot be loaded"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(copy, change, match):
    """Each has a cause and a remedy, and code in a folder never runs."""
    change(copy)
    with pytest.raises(ConfigError, match=match) as found:
        load_base(copy, "lm")
    assert "\n" not in found.value.message
    assert str(copy) in found.value.message


def test_too_little_memory_is_an_error_before_loading(llama, monkeypatch):
    """The system would end some process instead."""
    monkeypatch.setattr(bases, "available_bytes", lambda: 107_647)  # 26,912 weights take one more
    with pytest.raises(ConfigError, match=r"needs 0.0 GB of memory, and 0.0 GB are free"):
        load_base(llama, "lm")
    for enough in (107_648, None):
        monkeypatch.setattr(bases, "available_bytes", lambda: enough)  # noqa: B023
        load_base(llama, "lm")


def test_bf16_needs_a_gpu(llama):
    """On a CPU it would train in bf16 without a word."""
    with pytest.raises(ConfigError, match="CUDA"):
        load_base(llama, "lm", bf16=True)


def test_a_gguf_file_without_the_extra_is_one_line(tmp_path, monkeypatch):
    """The remedy is a command."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(bases.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(to_install("hf,gguf"))):
        load_base(tmp_path, "lm")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds a.gguf, b.gguf: give one"):
        load_base(tmp_path, "lm")


def write_gguf(folder, path):
    """The Llama of `folder` as a GGUF file in fp32. GGUF permutes rows of queries and keys."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(vocabulary, key=vocabulary.get)
    tokens[tiny_base.UNKNOWN] = "ab"  # the format has no empty list of merges
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(tiny_base.BEGIN)
    writer.add_eos_token_id(tiny_base.END)
    writer.add_pad_token_id(tiny_base.PAD)
    names = {
        "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
        "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    model = load_base(folder, "lm").model
    for name, weight in model.named_parameters():
        parts = name.split(".")
        block = "".join(f"blk.{part}." for part in parts if part.isdigit())
        values = weight.detach().numpy()
        if parts[-2] in heads:
            rows, columns = values.shape
            half = rows // heads[parts[-2]] // 2
            values = values.reshape(-1, 2, half, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(f"{block}{names[parts[-2]]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="needs the extra gguf")
def test_a_gguf_file_is_an_ordinary_model_in_fp32(llama, tmp_path, capsys):
    """Transformers marks what it loads from GGUF as quantized, and then refuses to train it."""
    source = write_gguf(llama, tmp_path / "tiny.gguf")
    base = load_base(tmp_path, "lm")
    ids = torch.tensor([[1, 50, 60, 70]])
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=ids).logits, source(input_ids=ids).logits)
    assert {weight.dtype for weight in base.model.parameters()} == {torch.float32}
    assert base.model.lm_head.weight is base.model.model.embed_tokens.weight
    base.model.float()
    base.model(input_ids=ids).logits.sum().backward()
    save_base(base, tmp_path / "saved")
    saved = load_base(tmp_path / "saved", "lm")
    with torch.no_grad():
        assert torch.equal(saved.model(input_ids=ids).logits, source(input_ids=ids).logits)
    assert saved.tokenizer("hello")["input_ids"] == base.tokenizer("hello")["input_ids"]
    classifier = load_base(tmp_path / "tiny.gguf", "classify", labels=LABELS, seed=3)
    wanted = load_base(llama, "classify", labels=LABELS, seed=3)
    assert classifier.drawn == ("score.weight",)
    assert torch.equal(classifier.model.score.weight, wanted.model.score.weight)
    assert torch.equal(classifier.model.model.norm.weight, wanted.model.model.norm.weight)
    assert "".join(capsys.readouterr()) == ""


def test_a_base_without_padding_and_end_cannot_classify(tmp_path):
    """Decoders look for the last token that is no padding."""
    base = tiny_base.write_llama(tmp_path / "base")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        path = base / name
        if path.exists():
            found = json.loads(path.read_text())
            for key in ("pad_token", "eos_token", "pad_token_id"):
                found.pop(key, None)
            path.write_text(json.dumps(found))
    load_base(base, "lm")
    with pytest.raises(ConfigError, match="names neither a padding token nor an end of text"):
        load_base(base, "classify", labels=("no", "yes"))


def test_a_base_without_a_longest_text_has_no_limit(tmp_path):
    """XLNet's config gives -1 positions."""
    folder = tiny_base.write_kind(tmp_path, "xlnet")
    assert load_base(folder, "classify", labels=("a", "b"), seed=0).context == 0
