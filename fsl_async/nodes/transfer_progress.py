"""Finds the peers whose transfers advance; at its end a role waits for those only."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import fsl_transport as tp
from fsl_async.roles.sync.events import TransfersChecked


class TransferProgress:
    """Compares transfers with those at the last check; before the first check there were none."""

    def __init__(self) -> None:
        self._seen: dict[str, set[tuple[str, bool, int]]] = {}

    def look(
        self, transfers: Iterable[tp.Transfer], busy: Collection[str] = ()
    ) -> TransfersChecked:
        """The peers with a stream that began, advanced by a chunk or ended since the last check.

        busy: peers that count too, because what they sent is being stored.
        """
        now: dict[str, set[tuple[str, bool, int]]] = {}
        for transfer in transfers:
            place = (transfer.stream_id, transfer.sending, transfer.done)
            now.setdefault(transfer.peer, set()).add(place)
        before, self._seen = self._seen, now
        moved = {peer for peer in {*before, *now} if before.get(peer) != now.get(peer)}
        moved.update(busy)
        return TransfersChecked(tuple(sorted(moved)))
