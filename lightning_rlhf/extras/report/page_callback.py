"""ReportPage: writes the report page at the end of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rlhf.callbacks.records.run_files import RUN_END
from lightning_rlhf.callbacks.records.run_reader import RunReader
from lightning_rlhf.extras.report.page import report_page
from lightning_rlhf.extras.report.run_directory import ENGINE, RunDirectory

log = logging.getLogger(__name__)
_LONGEST_ERROR = 4000  # characters


class ReportPage(RunReader):
    """Writes ``report.html`` when a run ends or fails, with curves, health checks, times and responses.

    It reads the files of other callbacks, so you get no page without ``metrics.csv``. The file ``end.json`` contains
    null, or the error if the run failed. It is absent while a run continues, and after the run was killed. If the files
    cannot be written, you get a warning, and the run ends as it would without this callback.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the end of the run that this run continues."""
        if trainer.is_global_zero and not trainer.fast_dev_run:
            (Path(trainer.default_root_dir) / RUN_END).unlink(missing_ok=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write which engine and program generate the rollouts, for the page's table of the environment."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        callbacks: list[Any] = trainer.callbacks
        found = [callback.engine_description for callback in callbacks if hasattr(callback, "engine_description")]
        if not found:
            return
        try:
            (Path(trainer.default_root_dir) / ENGINE).write_text(json.dumps({"engine": found[0]}) + "\n")
        except OSError as error:
            log.warning("%s was not written: %s: %s", ENGINE, type(error).__name__, error)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page of a run that has ended."""
        self._write(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the page of a run that failed."""
        self._write(trainer, f"{type(exception).__name__}: {exception}".rstrip(": ")[:_LONGEST_ERROR])

    def _write(self, trainer: Trainer, failure: str | None) -> None:
        directory = Path(trainer.default_root_dir)
        if not trainer.is_global_zero or trainer.fast_dev_run or not directory.is_dir():
            return
        path = directory / "report.html"
        try:
            (directory / RUN_END).write_text(json.dumps({"error": failure}) + "\n", encoding="utf-8")
            if not (directory / "metrics.csv").is_file():
                return
            path.write_text(report_page([RunDirectory(directory)]), encoding="utf-8")
        except (OSError, ValueError) as error:  # of the disk, or of a file that was cut off
            log.warning("report.html was not written: %s: %s", type(error).__name__, error)
        else:
            log.info("report: %s", path)
