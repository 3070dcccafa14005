"""Loggers: trackio, tables of texts, and one run of a logger over several resumes of a run."""

from __future__ import annotations

import copy
import html
import json
import secrets
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.expected_errors import MissingPackageError, UsageError

RUN_IDS = "loggers.json"  # in the directory of a run
_LONGEST_CELL = 4000  # characters


class TrackioLogger(Logger):
    """Logger of trackio, which stores runs in a local database (in ``TRACKIO_DIR``); ``trackio show`` opens its page.

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


# Loggers whose runs can be continued, with the argument for the identifier of a run.
_ID_ARGUMENTS: dict[type[Logger], str] = {WandbLogger: "id", MLFlowLogger: "run_id", TrackioLogger: "run_id"}


def log_table(logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    """Log a table of texts and numbers, if the logger has tables or texts; long texts are cut.

    Args:
        logger: a logger; all but wandb, mlflow, trackio and TensorBoard are left out.
        name: name of the table.
        columns: names of its columns.
        rows: values of its rows.
    """
    cells = [[cell if isinstance(cell, int | float) else str(cell)[-_LONGEST_CELL:] for cell in row] for row in rows]
    if isinstance(logger, WandbLogger | TrackioLogger):
        logger.log_table(name, columns=list(columns), data=cells, step=step)
    elif isinstance(logger, MLFlowLogger):
        values = {column: [row[i] for row in cells] for i, column in enumerate(columns)}
        logger.experiment.log_table(logger.run_id, values, f"{name}/step-{step:06d}.json")
    elif isinstance(logger, TensorBoardLogger):
        lines = [columns, ["---"] * len(columns), *cells]
        text = "\n".join("| " + " | ".join(_markdown(cell) for cell in line) + " |" for line in lines)
        logger.experiment.add_text(name, text, step)


def _markdown(cell: Any) -> str:
    """Return a value as one cell of a table, in which characters of Markdown and HTML are only characters."""
    text = str(cell) if cell == "---" else html.escape(str(cell))
    return "".join(f"\\{mark}" if mark in "\\|`*_[]" else mark for mark in text).replace("\n", "<br>")


def log_configuration(logger: Logger, settings: dict[str, Any]) -> None:
    """Log the configuration of a run as hyperparameters.

    Parameters of mlflow cannot change, so those of a resumed run stay, and its artifact ``config.json`` is replaced.
    """
    if isinstance(logger, MLFlowLogger):
        client, run = logger.experiment, logger.run_id
        client.log_dict(run, settings, "config.json")
        if client.get_run(run).data.params:
            return
    logger.log_hyperparams(settings)


def save_run_ids(loggers: Sequence[Logger], directory: Path) -> None:
    """Write the identifiers of the loggers' runs into the directory of a run, for its continuation."""
    ids = {type(logger).__name__: str(logger.version) for logger in loggers if type(logger) in _ID_ARGUMENTS}
    if ids:
        (directory / RUN_IDS).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def with_run_ids(settings: Any, directory: Path) -> Any:
    """Return the settings of loggers with the identifiers of their runs, where none is configured.

    Args:
        settings: value of ``trainer.logger`` in a parsed configuration.
        directory: directory of the run that is resumed.

    Raises:
        UsageError: the file with the identifiers is damaged.
    """
    path = directory / RUN_IDS
    if not path.is_file():
        return settings
    try:
        ids = dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged ({error}): remove it, and the loggers begin new runs") from error
    made = copy.deepcopy(settings)
    for entry in made if isinstance(made, list) else [made]:
        name = getattr(entry, "class_path", "").rpartition(".")[2]
        argument = next((argument_name for kind, argument_name in _ID_ARGUMENTS.items() if kind.__name__ == name), None)
        if argument is not None and name in ids and entry.init_args.get(argument) is None:
            entry.init_args[argument] = ids[name]
    return made
