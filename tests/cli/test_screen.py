"""Lightning's messages are shown but for those of every run, and the last line gives the reason of the end."""

import logging
import warnings
from pathlib import Path

import pytest
import yaml

from lightning_rlhf.cli.screen import RoutineFilter, configure_messages

LIGHTNING = "lightning.pytorch.callbacks"


def test_a_profile_is_printed_and_routine_is_not(fit, config):
    config["trainer"]["profiler"] = "simple"
    result = fit(config)
    assert result.code == 0
    assert "FIT Profiler Report" in result.out
    for routine in ("GPU available", "TPU available", "Tip", "Seed set", "`Trainer.fit` stopped"):
        assert routine not in result.out + result.err


def test_a_run_of_its_own_length_says_so_in_its_last_line(fit, config):
    result = fit(config)
    assert result.out.splitlines()[-1] == "ended after step 2: max_steps is 2; results are in runs/tiny"
    assert result.err == ""


def test_an_early_stop_is_told_by_lightning_and_by_the_last_line(fit, config):
    config["trainer"]["callbacks"].append(
        {
            "class_path": f"{LIGHTNING}.EarlyStopping",
            "init_args": {
                "monitor": "reward/mean", "verbose": True, "patience": 1, "min_delta": 100.0,
                "check_on_train_epoch_end": True,
            },
        }
    )  # fmt: skip
    config["trainer"] |= {"max_steps": 50, "limit_train_batches": 1}
    result = fit(config)
    assert "Monitored metric reward/mean did not improve in the last 1 records" in result.out
    message = "ended after step 2: EarlyStopping stopped it: reward/mean did not improve; results are in runs/tiny"
    assert result.out.splitlines()[-1] == message


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
def test_the_last_line_names_what_ended_the_run(fit, config, settings, message):
    config["trainer"] |= settings
    assert fit(config).out.splitlines()[-1] == message


def test_warnings_pass_the_filter_whatever_they_say():
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
def test_advice_that_does_not_apply_to_these_runs_is_not_shown(text):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        configure_messages()
        warnings.warn(text, stacklevel=1)
        warnings.warn("another warning", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another warning"]


def test_loggers_are_given_the_configuration_as_hyperparameters(fit, config):
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "logs"},
    }
    assert fit(config).code == 0
    (written,) = Path("logs").rglob("hparams.yaml")
    logged = yaml.safe_load(written.read_text())
    assert logged["data"]["init_args"]["batch_size"] == 4
    assert logged["model"]["class_path"] == "lightning_rlhf.PPOModule"
