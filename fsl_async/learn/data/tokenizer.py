"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`.

    facts_of        vocabulary, end-of-text token and digest, from the JSON alone: what a run fixes;
                    the parameter server needs no more, and no package
    Bytes           a token is a byte of UTF-8; a text ends with byte 255, which UTF-8 never has
    HubTokenizer    encodes, with the `tokenizers` package (in the extras hf and datasets)

The digest is over the parsed file, without what only shapes batches (truncation, padding), so that
it depends neither on the package's version nor on how the file is written.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.errors import DataError
from fsl_async.learn.data.dataset import extra, json_object

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<|eos|>", "[EOS]",
    "<|end|>", "[SEP]",
)  # fmt: skip
"""Usual names of the end-of-text token, where no tokenizer_config.json has its name."""
MOST_BYTES = 256_000_000
MOST_VOCABULARY = 1 << 22

Tokens = npt.NDArray[np.int32]


@attrs.frozen(slots=True)
class TokenizerFacts:
    """Properties of a tokenizer that a run fixes.

    path: of its tokenizer.json; end: id of its end of text.
    """

    path: Path
    digest: str
    vocabulary: int
    end: int


class Bytes:
    """A token for each byte."""

    vocabulary = 256
    end = 255
    digest = ""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode each text; characters that are half a surrogate pair become "?"."""
        return [
            np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32)
            for text in texts
        ]


class HubTokenizer:
    """A tokenizer of the `tokenizers` package. Raises DataError, also without that package."""

    def __init__(self, facts: TokenizerFacts) -> None:
        tokenizers = extra("tokenizers", f"tokenizer {str(facts.path)!r}")
        self.vocabulary, self.end, self.digest = facts.vocabulary, facts.end, facts.digest
        try:
            self._found = tokenizers.Tokenizer.from_file(str(facts.path))
        except (KeyboardInterrupt, SystemExit):
            raise
        # The package raises Exception itself, and its panics are no Exception.
        except BaseException as error:  # noqa: BLE001
            raise DataError(
                f"tokenizer {str(facts.path)!r} cannot be read by this version of tokenizers"
                f" ({str(error)[:200]})"
            ) from None
        self._check(facts.path)
        self._found.no_truncation()
        self._found.no_padding()

    def _check(self, path: Path) -> None:
        """Raise DataError where the package numbers tokens otherwise than the file says.

        It does so with an added token whose id is not the next one.
        """
        ids, made = _ids(path, _json(path)), self._found.get_vocab(with_added_tokens=True)
        if made == ids:
            return
        token = min(name for name in made.keys() | ids if made.get(name) != ids.get(name))
        raise DataError(
            f"tokenizer {str(path)!r} is damaged: token {token[:40]!r} has the id {ids.get(token)}"
            f" in the file, and {made.get(token)} when tokenizers has read it"
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode each text, on all cores; the interpreter's lock is free meanwhile."""
        found = self._found.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in found]


Coder = Bytes | HubTokenizer
"""Turns texts into tokens, below `vocabulary`; `end` is the token after a text."""


def coder_of(facts: TokenizerFacts | None) -> Coder:
    """The coder of a tokenizer; None: of bytes."""
    return Bytes() if facts is None else HubTokenizer(facts)


def facts_of(given: str) -> TokenizerFacts:
    """Read a tokenizer.json, the one in a folder, or that of a name at Hugging Face's hub.

    A name is looked up where there is no such path; that needs huggingface_hub, and the network
    unless it is in the cache. Raises DataError.
    """
    path = Path(given).expanduser()
    if not path.exists():
        path = _from_hub(given)
    elif path.is_dir():
        path = path / FILE
    members = _json(path)
    ids = _ids(path, members)
    vocabulary = max(ids.values(), default=-1) + 1
    if not 0 < vocabulary <= MOST_VOCABULARY or min(ids.values()) < 0:
        raise DataError(f"tokenizer {str(path)!r} has ids up to {vocabulary - 1}: it is damaged")
    known = {name: part for name, part in members.items() if name not in {"truncation", "padding"}}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
    return TokenizerFacts(path, digest, vocabulary, _end(path, ids))


def _ids(path: Path, members: dict[str, Any]) -> dict[str, int]:
    """The id of each token."""
    model, added = members.get("model"), members.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(words, list):  # Unigram: pairs of a token and its score
            ids = {str(pair[0]): index for index, pair in enumerate(words)}
        else:
            ids = {str(name): int(index) for name, index in dict(words or {}).items()}
        ids |= {str(one["content"]): int(one["id"]) for one in added or ()}
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        ids = {}
    if not ids:
        raise DataError(
            f"tokenizer {str(path)!r} has no vocabulary: give a {FILE} of the tokenizers library"
        )
    return ids


def _end(path: Path, ids: dict[str, int]) -> int:
    """Id of the end-of-text token: as tokenizer_config.json names it, else by its usual names."""
    beside = path.with_name(CONFIG)
    named = _json(beside).get("eos_token") if beside.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    for name in [named, *ENDS]:
        if isinstance(name, str) and name in ids:
            return ids[name]
    raise DataError(
        f"tokenizer {str(path)!r} has no end-of-text token, which separates texts: name one of its"
        f' tokens as "eos_token" in a {CONFIG} beside it'
    )


def _from_hub(name: str) -> Path:
    what = f"tokenizer {name[:200]!r} is no file or folder here; as a name at the hub it"
    hub = extra("huggingface_hub", what)
    try:
        found = Path(hub.hf_hub_download(name, FILE))
    except Exception as error:  # noqa: BLE001 - the network's, the hub's and the name's
        reason = str(error).strip().partition("\n")[0][:200]
        raise DataError(
            f"tokenizer {name[:200]!r}: no such file or folder, and the hub does not give it"
            f" ({type(error).__name__}: {reason})"
        ) from None
    try:  # the name of its end-of-text token; some have none
        hub.hf_hub_download(name, CONFIG)
    except Exception:  # noqa: BLE001
        return found
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"cannot read tokenizer {str(path)!r} ({error.strerror or error}): give a {FILE}, or a"
            " folder with one"
        ) from None
    if len(data) > MOST_BYTES:
        raise DataError(f"tokenizer {str(path)!r} is larger than {MOST_BYTES // 10**6} MB")
    found = json_object(data)
    if found is None:
        raise DataError(f"tokenizer {str(path)!r} is damaged: no object of JSON")
    return found
