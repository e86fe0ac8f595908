"""Checks that a language model does not read the tokens that come later.

Encoders load as causal language models, too: BERT as BertLMHeadModel with `is_decoder = False`. The
loss of the next token then falls without anything being learned, because the token is in the input.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsl_async.errors import ConfigError, one_line
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.models.hf import extra
from fsl_async.learn.models.quantized import keep_packed

TOKENS = 8
MOST_CHANGE, MOST_NARROW_CHANGE = 1e-3, 3e-2
"""How much earlier logits may change, as a part of how much later ones do. In fp32 causal models
have 0 to 1e-5, encoders with random weights 3e-3 and more; in bf16 rounding alone gives 1e-2."""


def check_causal(model: nn.Module, log: Callable[[str], None]) -> None:
    """Raise ConfigError where a causal language model of transformers is not causal.

    One forward pass of two rows of 8 tokens, of which the last 4 differ: logits at the first 4 must
    be the same. Models of other classes pass, such as those of masked language modeling. A model
    that does not compute from tokens alone is a line for the log.
    """
    found = _causal_class(model)
    if found is None:
        return
    keep_packed(found)
    words = int(found.get_input_embeddings().weight.shape[0])
    device = found.get_input_embeddings().weight.device
    first = torch.arange(2, 2 + TOKENS, device=device) % words
    other = torch.cat([first[: TOKENS // 2], (words - 1 - first[TOKENS // 2 :]) % words])
    try:
        with torch.no_grad(), evaluating(model):
            one, two = found(input_ids=torch.stack([first, other])).logits.float()
    except (RuntimeError, TypeError, ValueError) as error:
        log(f"not checked that {type(found).__name__} is causal: {one_line(str(error))[:200]}")
        return
    change = (one - two).abs().amax(-1)
    earlier, later = change[: TOKENS // 2].max(), change[TOKENS // 2 :].max()
    is_fp32 = next(found.parameters()).dtype.itemsize >= 4
    if earlier > later * (MOST_CHANGE if is_fp32 else MOST_NARROW_CHANGE):
        raise ConfigError(
            f"a {found.config.model_type} model ({type(found).__name__}) reads the tokens that it"
            " should predict: take a base that was trained to predict the next token, or"
            " tune.objective = classify"
        )


def _causal_class(model: nn.Module) -> Any:
    """The first module of a class that transformers lists as a causal language model."""
    if "transformers" not in sys.modules:
        return None
    listed = extra("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = set(listed.values())
    for part in model.modules():
        if any(kind.__name__ in names for kind in type(part).__mro__):
            return part
    return None
