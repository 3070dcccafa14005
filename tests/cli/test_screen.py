"""Routine messages of Lightning are hidden, others are shown, and the last line gives the reason of the end."""

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping

from lightning_rlhf.cli.screen import RoutineFilter, configure_messages, last_line

LIGHTNING = "lightning.pytorch.callbacks"


@pytest.mark.slow
def test_profile_is_printed_and_routine_messages_are_not(fit, config):
    config["trainer"]["profiler"] = "simple"
    result = fit(config)
    assert result.code == 0
    assert "FIT Profiler Report" in result.out
    for routine in ("GPU available", "TPU available", "Tip", "Seed set", "`Trainer.fit` stopped"):
        assert routine not in result.out + result.err


def test_last_line_of_a_complete_run_gives_its_length(fit, config):
    result = fit(config)
    assert result.out.splitlines()[-1] == "ended after step 2: max_steps is 2; results are in runs/tiny"
    assert result.err == ""


def test_early_stop_is_reported_by_lightning_and_in_the_last_line(fit, config):
    config["trainer"]["callbacks"].append(
        {
            "class_path": f"{LIGHTNING}.EarlyStopping",
            "init_args": {
                "monitor": "reward/mean", "mode": "max", "verbose": True, "patience": 1, "min_delta": 100.0,
                "check_on_train_epoch_end": True,
            },
        }
    )  # fmt: skip
    config["trainer"] |= {"max_steps": 50, "limit_train_batches": 1}
    result = fit(config)
    assert "Monitored metric reward/mean did not improve in the last 1 records" in result.out
    assert result.out.splitlines()[-1] == (
        "ended after step 2: EarlyStopping stopped it: Monitored metric reward/mean did not improve in the last 1 "
        "records; results are in runs/tiny"
    )


def test_stop_in_the_first_epoch_is_named_with_its_reason(fit, config):
    threshold = {"monitor": "reward/mean", "mode": "max", "stopping_threshold": -1.0, "check_on_train_epoch_end": True}
    config["trainer"]["callbacks"].append({"class_path": "EarlyStopping", "init_args": threshold})
    config["trainer"] |= {"max_steps": 50, "limit_train_batches": 1}
    last = fit(config).out.splitlines()[-1]
    assert last.startswith("ended after step 1: EarlyStopping stopped it: Stopping threshold reached: reward/mean = ")
    assert last.endswith(" > -1.0; results are in runs/tiny")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -1, "max_epochs": 1}, "ended after step 3: max_epochs is 1; results are in runs/tiny"),
        (
            {"max_steps": 50, "max_time": "00:00:00:00"},
            "ended after step 0: max_time was reached; results are in runs/tiny",
        ),
    ],
)
def test_last_line_gives_the_reason_of_the_end(fit, config, settings, message):
    config["trainer"] |= settings
    assert fit(config).out.splitlines()[-1] == message


def test_stop_of_the_run_before_is_not_that_of_the_resumed_one():
    stopped = EarlyStopping("reward/mean")
    stopped.load_state_dict({**stopped.state_dict(), "stopping_reason_message": "no improvement"})
    run = SimpleNamespace(
        global_step=8, max_steps=-1, max_epochs=4, current_epoch=4, callbacks=[stopped], should_stop=False,
        default_root_dir="runs/x",
    )  # fmt: skip
    assert last_line(run) == "ended after step 8: max_epochs is 4; results are in runs/x"


def test_warnings_are_never_filtered():
    shown = RoutineFilter().filter
    assert not shown(logging.LogRecord("x", logging.INFO, "", 0, "GPU available: False, used: False", None, None))
    assert shown(logging.LogRecord("x", logging.WARNING, "", 0, "GPU available: False, used: False", None, None))
    assert shown(logging.LogRecord("x", logging.INFO, "", 0, "Metric x improved", None, None))


@pytest.mark.parametrize(
    "text",
    [
        "Using ModelCheckpoint with manual optimization and other advice of twelve lines",
        "`torch.distributed.reduce_op` is deprecated, please use `torch.distributed.ReduceOp` instead",
    ],
)
def test_irrelevant_advice_is_not_shown(text):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        configure_messages()
        warnings.warn(text, stacklevel=1)
        warnings.warn("another warning", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another warning"]


@pytest.mark.slow
def test_loggers_receive_the_configuration_as_hyperparameters(fit, config):
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "logs"},
    }
    assert fit(config).code == 0
    (written,) = Path("logs").rglob("hparams.yaml")
    logged = yaml.safe_load(written.read_text())
    assert logged["data"]["init_args"]["batch_size"] == 4
    assert logged["model"]["class_path"] == "lightning_rlhf.PPOModule"
