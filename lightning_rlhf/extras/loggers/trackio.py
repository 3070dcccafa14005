"""A logger of trackio."""

from __future__ import annotations

import secrets
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.expected_errors import MissingPackageError


class TrackioLogger(Logger):
    """Logger of trackio, which stores runs in a local database (in ``TRACKIO_DIR``); ``trackio show`` opens its page.

    It does not send runs to a Hugging Face Space.

    Args:
        project: name of the project.
        run_id: name of the run; None makes one. A run with the name of an earlier one continues it.

    Raises:
        MissingPackageError: trackio is not installed.
    """

    def __init__(self, project: str = "lightning-rlhf", run_id: str | None = None) -> None:
        super().__init__()
        try:
            import trackio  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                "TrackioLogger needs the package trackio: run pip install 'lightning-rlhf[trackio]'"
            ) from error
        self._project = project
        self._run_id = run_id or secrets.token_hex(4)
        self._run: Any = None

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str:
        """Name of the run."""
        return self._run_id

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Run of trackio, started when it is first used."""
        if self._run is None:
            import trackio

            self._run = trackio.init(self._project, name=self._run_id, resume="allow", embed=False)
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Log the configuration of the run."""
        self.experiment.config.update(vars(params) if isinstance(params, Namespace) else dict(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics of a step."""
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None:
        """Log a table.

        Args:
            key: name of the table.
            columns: names of its columns.
            data: rows.
        """
        import trackio

        self.experiment.log({key: trackio.Table(columns=columns, data=data)}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write all values that are not stored yet."""
        if self._run is not None:
            self._run.finish()
            self._run = None
