"""Text as a data set: adjacent windows of a span of a corpus; tokens are bytes."""

import numpy as np

from fsl_async.learn.data.base import AnyArray, Dataset, Indices
from fsl_async.learn.data.corpus import Corpus, Span


class TextWindows(Dataset):
    """Windows of a span; sample i is the bytes from i * context on, uint8 (context + 1,).

    It holds the inputs and, shifted by one, the targets. Adjacent windows share one byte, so each
    byte is predicted once. There are no labels. span: default is the corpus's training part.
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
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of corpus and span: without labels the base's would not tell data apart."""
        return f"{self._corpus.fingerprint[:16]}{super().fingerprint[:16]}"

    def _take(self, indices: Indices) -> AnyArray:
        out = np.empty((len(indices), *self.sample_shape), np.uint8)
        for row, index in enumerate(indices):
            self._corpus.read_into(self._span.start + int(index) * self._context, out[row])
        return out
