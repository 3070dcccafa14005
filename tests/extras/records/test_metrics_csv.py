"""The file metrics.csv: rows are not lost, repeated or incomplete."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import HealthChecks, MetricsCSV, RunState
from lightning_rlhf.callbacks.records.run_files import read_metrics
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.extras.report.page import run_data
from lightning_rlhf.extras.report.run_directory import RunDirectory
from tests.callbacks.conftest import ROWS
from tests.callbacks.test_other_modules import Regression
from tests.callbacks.test_other_modules import fit as fit_other


def a_trainer(directory, step=0, resumed=False, fn="fit", **metrics):
    return SimpleNamespace(
        state=SimpleNamespace(fn=fn),
        default_root_dir=str(directory),
        global_step=step,
        ckpt_path="last.ckpt" if resumed else None,
        is_global_zero=True,
        fast_dev_run=False,
        sanity_checking=False,
        callback_metrics={name.replace("_", "/"): torch.tensor(value) for name, value in metrics.items()},
    )


def train(table, directory, step, **metrics):
    trainer = a_trainer(directory, step, **metrics)
    table.on_train_batch_start(a_trainer(directory, step), None, None, 0)
    table.on_train_batch_end(trainer, None, None, None, 0)


def validate(table, directory, step, before=(), **options):
    """Run a validation; ``before`` are the metrics that training has logged."""
    trainer = a_trainer(directory, step, **options)
    earlier = {name: torch.tensor(value) for name, value in dict(before).items()}
    trainer.callback_metrics |= earlier
    start = a_trainer(directory, step)
    start.callback_metrics = dict(earlier)
    table.on_validation_start(start, None)
    table.on_validation_end(trainer, None)


def written(directory, steps, validations, every=1):
    """Return a table of these training steps, with a validation after some of them."""
    table = MetricsCSV(every)
    if 0 in validations:
        validate(table, directory, 0, val_x=0.0)
    table.on_train_start(a_trainer(directory), None)
    for step in steps:
        train(table, directory, step, loss_x=step / 3)
        if step in validations:
            validate(table, directory, step, {"loss/x": step / 3}, val_x=float(step))
    return directory / "metrics.csv"


def lines(path):
    return [(int(row["step"]), row["loss/x"] != "") for row in read_metrics(path)]


def test_every_step_and_validation_has_a_row_including_the_one_before_training(tmp_path):
    path = written(tmp_path, range(1, 4), {0, 2})
    assert lines(path) == [(0, False), (1, True), (2, True), (2, False), (3, True)]
    assert read_metrics(path)[1] == {"step": "1", "val/x": "", "loss/x": repr(float(torch.tensor(1 / 3)))}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_resumed_table_keeps_the_rows_before_the_checkpoint(tmp_path, at):
    path = written(tmp_path, range(1, 4), {0, 2})
    MetricsCSV().on_train_start(a_trainer(tmp_path, at, resumed=True), None)
    whole = [(0, False), (1, True), (2, True), (2, False), (3, True)]
    assert lines(path) == {1: whole[:2], 2: whole[:3], 3: whole}[at]  # the validation behind step 2 is run again


def test_validation_before_the_first_row_of_a_resumed_run_keeps_the_table(tmp_path):
    path = written(tmp_path, range(1, 4), {0, 2})
    table = MetricsCSV()
    validate(table, tmp_path, 2, resumed=True, val_x=9.0)
    table.on_train_start(a_trainer(tmp_path, 2, resumed=True), None)
    assert lines(path) == [(0, False), (1, True), (2, True), (2, False)]
    assert read_metrics(path)[-1]["val/x"] == "9.0"


def test_validate_command_writes_nothing(tmp_path):
    path = written(tmp_path, range(1, 4), {0, 2})
    before = path.read_bytes()
    validate(MetricsCSV(), tmp_path, 2, resumed=True, fn="validate", val_x=9.0)
    validate(MetricsCSV(), tmp_path, 0, fn="validate", val_x=9.0)
    assert path.read_bytes() == before


def test_new_run_starts_a_new_table(tmp_path):
    path = written(tmp_path, range(1, 4), {0})
    MetricsCSV().on_train_start(a_trainer(tmp_path), None)
    assert path.read_text().splitlines() == ["step"]


@pytest.mark.parametrize("cut", [2, 5, 30])
def test_incomplete_last_line_is_ignored(tmp_path, cut):
    path = written(tmp_path, range(1, 4), {0})
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(lines(path)) <= {(0, False), (1, True), (2, True)}


def test_new_columns_are_added_and_old_rows_keep_their_values(tmp_path):
    path = written(tmp_path, [1], set())
    table = MetricsCSV()
    table.on_train_start(a_trainer(tmp_path, 1, resumed=True), None)
    train(table, tmp_path, 2, loss_x=1.0, a_new=2.0)
    assert [(row["loss/x"] != "", row["a/new"]) for row in read_metrics(path)] == [(True, ""), (True, "2.0")]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


def test_every_n_steps_counts_training_steps_and_not_validations(tmp_path):
    assert lines(written(tmp_path, range(1, 6), {0, 3}, every=2)) == [(0, False), (2, True), (3, False), (4, True)]


def test_zero_steps_between_rows_raise():
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        MetricsCSV(0)


def test_second_fit_with_the_same_callback_starts_a_new_table(tmp_path):
    table = MetricsCSV()
    for name in ("first", "second"):
        table.setup(a_trainer(tmp_path / name), None, "fit")
        table.on_train_start(a_trainer(tmp_path / name), None)
        train(table, tmp_path / name, 1, loss_x=1.0)
    assert [lines(tmp_path / name / "metrics.csv") for name in ("first", "second")] == [[(1, True)]] * 2


class CustomMetrics(Callback):
    """Logs custom metrics: one only in validation, and one both in steps and in validation."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("eval/mine", 10.0 + trainer.global_step)
        pl_module.log("both", 20.0 + trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 3:
            pl_module.log("both", float(trainer.global_step))


class SavesAt(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def run_with_mine(run, steps, *more, **options):
    trainer = {"max_epochs": 9, "max_steps": steps, "val_check_interval": 2}
    callbacks = [CustomMetrics(), MetricsCSV(), HealthChecks(), RunState(), *more]
    return run(data={"val": InMemory(ROWS)}, trainer=trainer, callbacks=callbacks).fit(**options)


WITH_MINE = [  # step, of a validation, eval/mine, both
    ("0", True, "10.0", "20.0"), ("1", False, "", "1.0"), ("2", False, "", "2.0"), ("2", True, "12.0", "22.0"),
    ("3", False, "", ""), ("4", False, "", "4.0"), ("4", True, "14.0", "24.0"), ("5", False, "", "5.0"),
    ("5", True, "15.0", "25.0"),
]  # fmt: skip


def with_mine(path):
    rows = read_metrics(path)
    return [(row["step"], row["val/exact_greedy"] != "", row["eval/mine"], row["both"]) for row in rows]


def test_validation_metrics_without_the_prefix_are_only_in_the_validation_row(run, tmp_path):
    run_with_mine(run, 5)
    assert with_mine(tmp_path / "metrics.csv") == WITH_MINE
    (data,) = run_data([RunDirectory(tmp_path)])
    assert data["validation"]["step"] == [0, 2, 4, 5]
    assert data["validation"]["val/eval/mine"] == [10.0, 12.0, 14.0, 15.0]
    assert data["validation"]["val/both"] == [20.0, 22.0, 24.0, 25.0]
    assert "eval/mine" not in data["training"]
    assert data["training"]["both"] == [1.0, 2.0, None, 4.0, 5.0]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_resumed_run_has_custom_metrics_in_the_same_rows(run, tmp_path, at):
    run_with_mine(run, 5, SavesAt(at, tmp_path / "x.ckpt"))
    run_with_mine(run, 5, ckpt_path=tmp_path / "x.ckpt")
    assert with_mine(tmp_path / "metrics.csv") == WITH_MINE


class Unprefixed(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.layer(batch[0]).pow(2).mean())


@pytest.mark.filterwarnings("ignore")
def test_validation_without_prefixed_metrics_is_marked(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.callbacks.test_other_modules.Regression", Unprefixed)
    fit_other(tmp_path, MetricsCSV(), HealthChecks())
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows if row["valid_loss"]] == ["2", "4"]
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2", "3", "4"]
    assert {row["validation"] for row in rows if row["valid_loss"]} == {"1"}
    MetricsCSV().on_train_start(a_trainer(tmp_path, 2, resumed=True), None)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == ["1", "2"]  # the validation runs again
    (data,) = run_data([RunDirectory(tmp_path)])
    assert data["training"]["step"] == [1, 2]
