"""Callbacks of this library with a LightningModule from elsewhere: the supported ones work, the others are rejected."""

import csv

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_rlhf.callbacks import (
    Console,
    GracefulShutdown,
    HealthChecks,
    HFExport,
    MetricsCSV,
    Report,
    ReportPage,
    RolloutLog,
    RunCheckpoint,
    RunState,
    StepProgressBar,
    Throughput,
)


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(directory, *callbacks, epochs=2, **options):
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8, 3)), 4)
    module = Regression()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=list(callbacks),
    )
    trainer.fit(module, data, data, **options)
    return module


@pytest.mark.filterwarnings("ignore")
def test_metrics_checks_pages_checkpoints_and_the_progress_bar_work(tmp_path):
    fit(tmp_path, MetricsCSV(), HealthChecks(), GracefulShutdown(), ReportPage(), StepProgressBar(), RunCheckpoint())
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2", "3", "4"]
    assert [row["step"] for row in rows if row["val/loss"]] == ["2", "4"]
    assert "train/loss" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "health_settings.json").is_file()


@pytest.mark.filterwarnings("ignore")
def test_run_continues_from_its_checkpoint(tmp_path):
    whole = fit(tmp_path / "whole", RunCheckpoint(), epochs=3)
    fit(tmp_path / "half", RunCheckpoint(), epochs=2)
    last = str(tmp_path / "half/checkpoints/last.ckpt")
    continued = fit(tmp_path / "half", RunCheckpoint(), epochs=3, ckpt_path=last)
    for parameter, other in zip(continued.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("callback", [Console, Throughput, RunState, Report, RolloutLog, HFExport])
def test_callbacks_that_need_rollouts_or_roles_raise_a_one_line_error(callback, tmp_path):
    with pytest.raises(ValueError, match=rf"^{callback.__name__} needs "):
        fit(tmp_path, callback())
