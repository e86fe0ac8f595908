"""Text as a data set: neighbouring windows of a span of a corpus, bytes as tokens, no labels of their own."""

import numpy as np

from fsl_async.learn.data.base import AnyArray, Dataset, Indices
from fsl_async.learn.data.corpus import Corpus, Span


class TextWindows(Dataset):
    """Sample i is the bytes from i * context on, uint8 (context + 1,): inputs and, shifted by one, the next bytes to predict.

    Neighbours share one byte, so that each byte is predicted once. `span`: the corpus's training part by default.
    """

    def __init__(self, corpus: Corpus, span: Span | None = None) -> None:
        self._corpus = corpus
        self._span = corpus.train if span is None else span
        self._context = corpus.window_bytes - 1
        samples = max(0, (self._span.bytes - 1) // self._context)
        super().__init__(
            str(corpus.root),
            samples,
            sample_shape=(corpus.window_bytes,),
            dtype=np.uint8,
            labels=None,
            classes=0,
        )

    @property
    def fingerprint(self) -> str:
        """That of the corpus and the span: there are no labels to tell data apart by."""
        return f"{self._corpus.fingerprint[:16]}{super().fingerprint[:16]}"

    def _take(self, indices: Indices) -> AnyArray:
        out = np.empty((len(indices), *self.sample_shape), np.uint8)
        for row, index in enumerate(indices):
            self._corpus.read_into(self._span.start + int(index) * self._context, out[row])
        return out
