"""Where clients are in their data: of the newest acknowledged delta, also after a restart."""

import numpy as np

from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode

LOSSLESS = CodecSpec(format="fp32")


def accept(store, digest, sequence, facts):
    delta = Delta(DeltaKey("a", 1, 0, sequence), digest, 9, 1, facts=facts)
    store.spool_begin(delta)
    store.spool_write(delta.key, 0, encode(np.ones(4, np.float32), LOSSLESS))
    store.spool_finish(delta.key)


def test_a_position_is_that_of_the_newest_acknowledged_delta(tmp_path):
    """Deltas without one leave it as it is; other facts are not in it."""
    store = Store(tmp_path / "run")
    store.recover()
    store.begin_initial(Manifest.from_shapes([("w", (4,))]))
    store.write_initial(0, encode(np.zeros(4, np.float32), LOSSLESS))
    digest = store.finish_initial().digest
    assert store.run.position("a") == {}
    accept(store, digest, 1, {"data_at": 3.0, "data_epoch": 1.0, "rank": 2.0})
    accept(store, digest, 2, {"data_at": 5.0, "data_epoch": 1.0, "data_odd": 7.0})
    accept(store, digest, 3, {"rank": 2.0})
    assert store.run.position("a") == {"data_at": 5.0, "data_epoch": 1.0}
    assert store.run.position("b") == {}
    store.close()
    again = Store(tmp_path / "run")
    again.recover()
    assert again.run.position("a") == {"data_at": 5.0, "data_epoch": 1.0}
    again.close()
