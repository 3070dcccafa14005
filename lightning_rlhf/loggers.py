"""Loggers: tables of texts, and one run of a logger over several resumes of a run."""

from __future__ import annotations

import copy
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from lightning_rlhf.expected_errors import UsageError

RUN_IDS = "loggers.json"  # in the directory of a run
_LONGEST_CELL = 4000  # characters


# Loggers whose runs can be continued, with the argument for the identifier of a run.
_ID_ARGUMENTS = {"WandbLogger": "id", "MLFlowLogger": "run_id", "TrackioLogger": "run_id"}


def log_table(logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    """Log a table of texts and numbers, if the logger has tables or texts; long texts are cut.

    Args:
        logger: a logger; one without a method ``log_table`` is left out, but for mlflow and TensorBoard.
        name: name of the table.
        columns: names of its columns.
        rows: values of its rows.
    """
    cells = [[cell if isinstance(cell, int | float) else str(cell)[-_LONGEST_CELL:] for cell in row] for row in rows]
    if hasattr(logger, "log_table"):
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
    ids = {type(logger).__name__: str(logger.version) for logger in loggers if type(logger).__name__ in _ID_ARGUMENTS}
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
        argument = _ID_ARGUMENTS.get(name)
        if argument is not None and name in ids and entry.init_args.get(argument) is None:
            entry.init_args[argument] = ids[name]
    return made
