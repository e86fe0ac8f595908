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


def write_bert(folder: Path, *, seed: int = 0) -> Path:
    """A BERT of 2 blocks of width 32 without a head, for classify."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=PAD,
    )
    return _write(BertModel, config, folder, seed, tokenizer(encoder=True))


def _write(kind, config, folder, seed, tokens):
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(str(folder))
        tokens.save_pretrained(str(folder))
    return folder
