"""The state of a split server, rebuilt from its journal alone. Pure. What became of its uploads says its ledger (`split_audit`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import field, fields, mutable

from fsl_async.accounting.accounts import Account
from fsl_async.observe import segments

Line = Mapping[str, Any]


@mutable
class SplitState:
    """Apply the journal's lines in order."""

    method: str = ""
    address: str = ""
    encrypted: bool | None = None
    """None: its journal is of a release that did not say."""
    pid: int = 0
    host: str = ""
    starts: int = 0
    last_t: float = 0.0
    ended_at: float | None = None
    ending: str = ""
    round: int = -1
    loss: float | None = None
    """Of the newest upload."""
    here: dict[str, bool] = field(factory=dict)
    account: Account = field(factory=Account)
    errors: dict[str, dict[str, float]] = field(factory=dict)
    """Coding errors that clients tell of what they send, by client."""

    def traffic(self) -> dict[str, dict[str, Any]]:
        """The account, with the mean square of what clients tell of the way up."""
        found = self.account.as_dict()
        for name in sorted({name for told in self.errors.values() for name in told}):
            squares = [told[name] ** 2 for told in self.errors.values() if name in told]
            found["error"][name] = float(f"{math.sqrt(sum(squares) / len(squares)):.4g}")
        return found

    def apply(self, line: Line) -> None:
        """Take one line; one that does not fit changes nothing."""
        stamp = line.get("t")
        if isinstance(stamp, int | float):
            self.last_t = float(stamp)
        self.account.apply(line)
        try:
            self._apply(line)
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def _apply(self, line: Line) -> None:
        match line.get("type"):
            case segments.SO_FAR:
                found = segments.restored(SplitState, line["state"])
                for each in fields(SplitState):
                    setattr(self, each.name, getattr(found, each.name))
                self.last_t = float(line["t"])
            case "node_started":
                self.method, self.address = str(line["method"]), str(line["address"])
                self.encrypted = told if isinstance(told := line.get("encrypted"), bool) else None
                self.pid, self.host = int(line.get("pid", 0)), str(line.get("host", ""))
                self.starts += 1
                self.ended_at, self.ending = None, ""
                self.here = dict.fromkeys(self.here, False)
            case "admit_split":
                self.here[str(line["peer"])] = True
            case "round_done_received":
                told = {k: float(v) for k, v in line["errors"].items() if k.endswith(" up")}
                self.errors.setdefault(str(line["peer"]), {}).update(told)
            case "client_left":
                self.here[str(line["peer"])] = False
            case "upload_trained" if line.get("problem") is None:
                self.loss = float(line["loss"])
                self.round = max(self.round, int(str(line["key"]).split("/")[2]))
            case "finish":
                self.ending = str(line.get("reason", ""))
            case "node_ended":
                self.ended_at = self.last_t
