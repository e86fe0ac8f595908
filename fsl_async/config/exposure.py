"""Says in a line how much of a site's records a run's settings expose to its server. Pure.

`fsl-node audit` measures it for a site's own records; tests hold this table against it.
"""

from collections.abc import Mapping
from typing import Literal

from fsl_async.config.settings_tuning import PRIVATE_RULES, TuneConfig

Exposure = Literal["scalars", "private", "sum", "embeddings", "b", "words"]

TABLE: Mapping[Exposure, str] = {
    "scalars": "sends numbers of zeroth order; no attack here reads words from them, and there is"
    " no bound",
    "private": "trains privately: what one record can change is bounded",
    "sum": "lets its server read the sum of its sites' updates, and no update",
    "embeddings": "trains the embedding, whose rows tell exactly which words the records have",
    "b": "trains factor B alone; no attack here reads words from it, and there is no bound",
    "words": "lets its server read words of the records",
}
"""Each sentence follows "this run"."""


def exposure_of(tune: TuneConfig, *, is_zeroth: bool, trains_embedding: bool) -> Exposure:
    """Return the row of the table."""
    if is_zeroth:
        return "scalars"
    if tune.is_private:
        return "private"
    if tune.secure:
        return "sum"
    if trains_embedding:
        return "embeddings"
    return "b" if tune.rule in PRIVATE_RULES and not tune.full else "words"


def exposure_line(found: Exposure) -> str:
    """The line that a client prints when it joins."""
    return f"this run {TABLE[found]} (fsl-node audit tells what of yours)"
