"""The data of the built-in pretraining where it is not text by bytes: texts of a source, packed."""

import json
import math
import sysconfig
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fsl_async.errors import DataError, TaskError
from fsl_async.files.files import make_folder, replace_bytes
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.data.corpus import HELD_OUT_SHARE
from fsl_async.learn.data.packing import Packer, check_of, held_out_tokens
from fsl_async.learn.data.sources import Source, location_of, open_source
from fsl_async.learn.data.tokenizer import Coder, coder_of, facts_of
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.models.gpt import GPT, Tables

MEASURED_BYTES = 1 << 14
"""As much of the held-out texts as is measured by bytes (`pretrain.EVALUATED_BYTES`)."""

KEPT_STATES = 8
"""States of a stream that are kept, of the newest snapshots."""


def run_coder(tables: Tables) -> Coder:
    """The site's tokenizer, checked against the run's. Raises DataError, TaskError."""
    expected = str(tables.get("model", {}).get("tokenizer", ""))
    given = str(tables.get("data", {}).get("tokenizer", ""))
    if not expected and not given:
        return coder_of(None)
    if not expected:
        raise TaskError(
            "this run trains on bytes, and this client has --tokenizer: leave it out (the run's is"
            " chosen by --tokenizer at the parameter server)"
        )
    if not given:
        raise TaskError(
            f"this run trains on tokens of tokenizer {expected[:8]}: give this client the same with"
            " --tokenizer PATH_OR_NAME"
        )
    facts = facts_of(given)
    if facts.digest != expected:
        raise TaskError(
            f"--tokenizer {given}: its digest is {facts.digest[:8]}, and the run's tokenizer has"
            f" {expected[:8]}: every site needs the same tokenizer.json"
        )
    return coder_of(facts)


class TokenData:
    """Tokens of a client's part of the texts.

    The ranks of a client read the same texts, and each takes its share of the windows, so that one
    position is that of all. Raises DataError, TaskError.
    """

    unit = "token"

    def __init__(self, fed: Fed, context: int, batch: int) -> None:
        given = fed.settings.data
        index, count = fed.part
        part = (index // fed.ranks, count // fed.ranks)
        self.coder = run_coder(fed.config)
        path = given.path or sysconfig.get_path("stdlib")
        self.source = open_source(location_of(path), part, given.holdout)
        self.holds_out = given.holdout > 0
        self._fed = fed
        check = check_of(self.source.fingerprint, self.coder.digest, context, fed.seed, *part)
        start = fed.position_in(check)
        self._states = None if fed.rank else fed.states_file
        self.packer = Packer(
            self.source,
            self.coder,
            context=context,
            batch=batch,
            seed=f"{fed.seed}/{part[0]}/{part[1]}",
            start=start,
            resume=self._read_states().get(_key_of(start.to_facts())),
            share=(fed.rank, fed.ranks),
        )

    def batches(self) -> Iterator[torch.Tensor]:
        """Windows, int64 (batch, context + 1) on the client's device, until the run ends."""
        fed = self._fed
        fed.keep_position(self.facts)
        for drawn in self.packer.batches():
            if not fed.running:
                return
            yield torch.from_numpy(drawn).to(fed.device)

    def facts(self) -> dict[str, float]:
        """The position after the last batch, as facts of a delta. Keeps the stream's state."""
        found = self.packer.position.to_facts()
        self._keep(found)
        return found

    def measure(self, model: GPT, limit_bytes: int = MEASURED_BYTES) -> dict[str, float]:
        """Loss in nats per token, and bits per byte, on held-out texts. Raises DataError."""
        return measured_tokens(model, self.source, self.coder, limit_bytes)

    def _keep(self, facts: dict[str, float]) -> None:
        state = self.packer.resume
        if self._states is None or state is None:
            return
        states, key = self._read_states(), _key_of(facts)
        states.pop(key, None)
        newest = dict([*states.items(), (key, state)][-KEPT_STATES:])
        try:
            make_folder(self._states.parent)
            replace_bytes(self._states, json.dumps(newest).encode())
        except (OSError, TypeError, ValueError):
            self._states = None  # a resume reads again instead

    def _read_states(self) -> dict[str, Any]:
        try:
            found = json.loads(self._states.read_bytes()) if self._states is not None else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _key_of(facts: dict[str, float]) -> str:
    """The key of the state of a block: its position, whatever is drawn of it."""
    return json.dumps(facts | {"data_drawn": 0.0}, sort_keys=True)


def open_held_out(tables: Tables) -> tuple[Source, Coder]:
    """Texts whose held-out ones are evaluated on, and the run's tokenizer.

    tables: of a run, with data.path and data.tokenizer of this machine. Raises DataError and
    TaskError.
    """
    given = tables.get("data", {})
    path = str(given.get("path") or sysconfig.get_path("stdlib"))
    held_out = float(given.get("holdout", HELD_OUT_SHARE))
    return open_source(location_of(path), (0, 1), held_out), run_coder(tables)


def measured_tokens(model: GPT, source: Source, coder: Coder, limit_bytes: int) -> dict[str, float]:
    """Loss in nats per token, and bits per byte, on at most so many bytes of held-out texts.

    Raises DataError.
    """
    tokens, size = held_out_tokens(source, coder, limit_bytes)
    nats = token_nats(model, tokens, model.config.context)
    return {"eval_loss": nats / (len(tokens) - 1), "eval_bits_per_byte": nats / math.log(2) / size}


BATCH = 8
"""Windows that are evaluated together."""


def token_nats(model: GPT, tokens: np.ndarray[Any, np.dtype[np.int32]], context: int) -> float:
    """Sum of the losses of all tokens but the first, in nats, by windows of the model's context.

    Raises DataError.
    """
    if len(tokens) < 2:
        raise DataError("nothing is held out: there is nothing to evaluate on")
    device, total = next(model.parameters()).device, 0.0
    starts = range(0, (len(tokens) - 1) // context * context, context)
    windows = [tokens[start : start + context + 1] for start in starts]
    batches = [np.stack(windows[at : at + BATCH]) for at in range(0, len(windows), BATCH)]
    if len(windows) * context < len(tokens) - 1:
        batches.append(tokens[None, len(windows) * context :])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.no_grad(), evaluating(model), autocast:
        for batch in batches:
            windows_NS = torch.from_numpy(batch).to(device).long()  # noqa: N806
            total += model.loss(windows_NS).item() * batch[:, 1:].size
    return total
