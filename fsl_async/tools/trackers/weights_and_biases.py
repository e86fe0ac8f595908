"""Points as a run of Weights & Biases. Needs `wandb` (extra of that name).

The run's id is that of the run here, so a restarted reader goes on in the same one
(`resume="allow"`). The last step of each series is in `wandb/fsl-<run>.json` beside what wandb
writes, because wandb offline cannot be asked. The x axis of all series is `version`, and rows have
the time of the journal.

`WANDB_MODE=offline` sends nothing; `wandb sync --append` uploads the folders later. Only figures
are handed over: no code, no list of packages, no measurements of this machine, no output.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from fsl_async.tools.trackers.catalog import Point

STEP, TOKENS = "version", "tokens/merged"


class WeightsAndBiases:
    """Logs to `project`. folder: where wandb makes its folder `wandb`.

    Raises ImportError, OSError, or an error of wandb's.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, run: str, folder: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports to its makers
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # wandb names its folder by the second: a second one of this second would replace the first.
        while any(folder.glob(time.strftime(f"wandb/*-%Y%m%d_%H%M%S-{run}"))):
            time.sleep(0.05)
        self._run: Any = wandb.init(
            project=project,
            id=run,
            name=run,
            resume="allow",
            dir=str(folder),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self.where = str(Path(self._run.dir).parent if self._run.offline else self._run.url)
        self._marks_at = folder / "wandb" / f"fsl-{run}.json"
        self._marks = _read(self._marks_at)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def written(self) -> dict[str, int]:
        """The last step of each series that a reader in this folder handed over."""
        return dict(self._marks)

    def log(self, point: Point) -> None:
        """Hand the point to wandb's process, then remember that."""
        self._run.log({**point.values, STEP: point.step, "_timestamp": point.t})
        self._marks |= dict.fromkeys(point.values, point.step)
        new = self._marks_at.with_suffix(".new")
        new.write_text(json.dumps(self._marks))
        new.replace(self._marks_at)

    def close(self) -> None:
        """Wait until wandb's process has written and sent everything."""
        self._run.finish()


def folder_of(environ: dict[str, str] | os._Environ[str] = os.environ) -> Path:
    """Where wandb's folder is made: WANDB_DIR, or the working directory, as wandb itself does."""
    return Path(environ.get("WANDB_DIR") or ".")


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())
        return {str(name): int(step) for name, step in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
