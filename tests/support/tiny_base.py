"""Tiny base models with tokenizers, written as Hugging Face folders. Nothing is downloaded.

A token is a byte, so any text can be encoded: bytes are tokens 4 ... 259, and 0 ... 3 are padding,
begin, end and unknown. Tests that use this skip without the extra `hf`.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from fsl_async.learn.tune.base import quiet

PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
VOCABULARY = 260
WIDTH, LAYERS, POSITIONS = 32, 2, 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, encoder: bool = False, chat: bool = False, pad_is_end: bool = False):
    """A byte-level tokenizer that begins texts, and of an encoder also ends them."""
    special = ["[PAD]", "<s>", "</s>", "[UNK]"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if encoder else "<s> $A",
        special_tokens=[("<s>", BEGIN), ("</s>", END)],
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="[UNK]",
        pad_token="</s>" if pad_is_end else "[PAD]",
        model_max_length=POSITIONS,
    )
    if chat:
        found.chat_template = CHAT_TEMPLATE
    return found


def write_llama(folder: Path, *, seed: int = 0, chat: bool = False) -> Path:
    """A Llama of 2 blocks of width 32, for lm and dpo (and classify)."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=True,
    )
    return _write(LlamaForCausalLM, config, folder, seed, tokenizer(chat=chat))


def write_bert(folder: Path, *, seed: int = 0, width: int = WIDTH) -> Path:
    """A BERT of 2 blocks of width 32 without a head, for classify."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=PAD,
    )
    return _write(BertModel, config, folder, seed, tokenizer(encoder=True))


_BLOCKS = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
SIZES = {
    "bert": _BLOCKS, "roberta": _BLOCKS, "electra": _BLOCKS | {"embedding_size": WIDTH // 2},
    "deberta-v2": _BLOCKS, "mpnet": _BLOCKS, "albert": _BLOCKS | {"embedding_size": WIDTH // 2},
    "distilbert": {
        "dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 1, "n_heads": 2,
        "max_position_embeddings": POSITIONS,
    },
    "bart": {
        "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": WIDTH, "decoder_ffn_dim": WIDTH,
        "max_position_embeddings": POSITIONS,
    },
    "gpt2": {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS},
    "xlnet": {"d_model": WIDTH, "d_inner": 2 * WIDTH, "n_layer": 1, "n_head": 2},
    "llama": _BLOCKS | {"num_key_value_heads": 2},
    "mixtral": _BLOCKS | {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2_moe": _BLOCKS | {
        "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": WIDTH,
        "shared_expert_intermediate_size": WIDTH,
    },
}  # fmt: skip
"""Sizes of a model of one block, by `model_type`."""


def write_kind(folder: Path, kind: str, *, auto: str = "AutoModel", **more) -> Path:
    """A model of this type, of one block of width 32. auto: the class that makes it."""
    import transformers

    special = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    sizes = special | SIZES[kind] | more
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **sizes)
    return _write(getattr(transformers, auto).from_config, config, folder, 0, tokenizer())


def _write(kind, config, folder, seed, tokens):
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(str(folder))
        tokens.save_pretrained(str(folder))
    return folder
