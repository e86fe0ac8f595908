"""Points as metrics of an MLflow run. Needs the extra `mlflow`: mlflow-skinny, and SQLAlchemy for
stores in a database file.

The run is found by its tag `fsl_async.run`, in the experiment of MLFLOW_EXPERIMENT_NAME or
"fsl-async"; the tracking server itself knows the last step of each metric. So a restarted reader
goes on from any machine.
"""

import os
from typing import Any

from fsl_async.tools.trackers.catalog import Point

TAG = "fsl_async.run"
EXPERIMENT = "fsl-async"
_DEFAULTS = {
    # A server that does not answer must not hold the reader for minutes; points wait.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Figures go to the store, and nothing to MLflow's makers.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Of the library, where the environment has nothing else."""


class MLflow:
    """Logs to the tracking store `uri`. Raises ImportError or an error of MLflow's."""

    name = "MLflow"

    def __init__(self, uri: str, run: str) -> None:
        for key, value in _DEFAULTS.items():
            os.environ.setdefault(key, value)
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(uri, uri)
        experiment = _experiment(self._client)
        tagged = f"tags.`{TAG}` = '{run}'"
        found = self._client.search_runs([experiment], tagged, max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        made = found[0] if found else self._client.create_run(experiment, None, {TAG: run}, run)
        self._id = made.info.run_id
        self.where = f"experiment {experiment}, run {self._id}"
        self._has = list(made.data.metrics)

    def written(self) -> dict[str, int]:
        """The last step of each metric that the store has."""
        history = self._client.get_metric_history
        return {name: max(one.step for one in history(self._id, name)) for name in self._has}

    def log(self, point: Point) -> None:
        """Add the point, in one request."""
        from mlflow.entities import Metric

        at_ms = int(point.t * 1000)
        metrics = [Metric(name, value, at_ms, point.step) for name, value in point.values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished; a reader that comes later opens it again."""
        self._client.set_terminated(self._id)


def _experiment(client: Any) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))
