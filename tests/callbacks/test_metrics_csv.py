"""metrics.csv: no row is lost, repeated or incomplete."""

from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf.callbacks import MetricsCSV
from lightning_rlhf.inspect.run_directory import read_metrics


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
    table.on_train_batch_end(a_trainer(directory, step, **metrics), None, None, None, 0)


def written(directory, steps, validations, every=1):
    """A table of these training steps, with a validation behind some of them."""
    table = MetricsCSV(every)
    if 0 in validations:
        table.on_validation_end(a_trainer(directory, 0, val_x=0.0), None)
    table.on_train_start(a_trainer(directory), None)
    for step in steps:
        train(table, directory, step, loss_x=step / 3)
        if step in validations:
            table.on_validation_end(a_trainer(directory, step, val_x=float(step), loss_x=step / 3), None)
    return directory / "metrics.csv"


def lines(path):
    return [(int(row["step"]), row["loss/x"] != "") for row in read_metrics(path)]


def test_a_row_per_step_and_per_validation_the_one_before_training_included(tmp_path):
    path = written(tmp_path, range(1, 4), {0, 2})
    assert lines(path) == [(0, False), (1, True), (2, True), (2, False), (3, True)]
    assert read_metrics(path)[1] == {"step": "1", "val/x": "", "loss/x": repr(float(torch.tensor(1 / 3)))}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_resumed_table_keeps_the_rows_before_the_checkpoint(tmp_path, at):
    path = written(tmp_path, range(1, 4), {0, 2})
    MetricsCSV().on_train_start(a_trainer(tmp_path, at, resumed=True), None)
    whole = [(0, False), (1, True), (2, True), (2, False), (3, True)]
    assert lines(path) == {1: whole[:2], 2: whole[:3], 3: whole}[at]  # the validation behind step 2 is run again


def test_a_validation_between_start_and_first_row_of_a_resumed_run_finds_the_table(tmp_path):
    path = written(tmp_path, range(1, 4), {0, 2})
    table = MetricsCSV()
    table.on_validation_end(a_trainer(tmp_path, 2, resumed=True, val_x=9.0), None)
    table.on_train_start(a_trainer(tmp_path, 2, resumed=True), None)
    assert lines(path) == [(0, False), (1, True), (2, True), (2, False)]
    assert read_metrics(path)[-1]["val/x"] == "9.0"


def test_the_command_validate_writes_nothing(tmp_path):
    path = written(tmp_path, range(1, 4), {0, 2})
    before = path.read_bytes()
    MetricsCSV().on_validation_end(a_trainer(tmp_path, 2, resumed=True, fn="validate", val_x=9.0), None)
    MetricsCSV().on_validation_end(a_trainer(tmp_path, 0, fn="validate", val_x=9.0), None)
    assert path.read_bytes() == before


def test_a_new_run_begins_a_new_table(tmp_path):
    path = written(tmp_path, range(1, 4), {0})
    MetricsCSV().on_train_start(a_trainer(tmp_path), None)
    assert path.read_text().splitlines() == ["step"]


@pytest.mark.parametrize("cut", [2, 5, 30])
def test_an_incomplete_last_line_is_ignored(tmp_path, cut):
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


def test_every_n_steps_counts_rollout_steps_and_not_validations(tmp_path):
    assert lines(written(tmp_path, range(1, 6), {0, 3}, every=2)) == [(0, False), (2, True), (3, False), (4, True)]


def test_zero_steps_between_rows_raise():
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        MetricsCSV(0)


def test_a_second_fit_with_the_same_callback_has_a_new_table(tmp_path):
    table = MetricsCSV()
    for name in ("first", "second"):
        table.setup(a_trainer(tmp_path / name), None, "fit")
        table.on_train_start(a_trainer(tmp_path / name), None)
        train(table, tmp_path / name, 1, loss_x=1.0)
    assert [lines(tmp_path / name / "metrics.csv") for name in ("first", "second")] == [[(1, True)]] * 2
