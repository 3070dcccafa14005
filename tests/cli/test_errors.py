"""Settings that Lightning rejects give a one-line message; bugs in user classes show their location."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch import Callback

from lightning_rlhf import PPOModule
from lightning_rlhf.data.rows import Row


class Buggy(Callback):
    def __init__(self, text: str = "seven"):
        self.number = int(text)


class BuggyRows:
    """One of two types that ``train`` accepts, so that jsonargparse also has an error for the other type."""

    def __init__(self, columns: int = 1):
        self.columns = {}["prompt"]

    def rows(self) -> Iterator[tuple[str, Row]]:
        yield from ()


class BuggyModule(PPOModule):
    def __init__(self, seven: str = "seven", **kwargs):
        super().__init__(**kwargs)
        self.number = int(seven)


@pytest.fixture(autouse=True)
def _by_dotted_path():
    sys.modules["tests.cli.test_errors"] = sys.modules[__name__]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator": "tpu"}, "Requirement 'torch_xla"),
        ({"devices": 0}, "`Trainer(devices=0)` value is not a valid input using cpu accelerator."),
        ({"limit_train_batches": 1.5}, "You have passed invalid value 1.5 for limit_train_batches, it has to be in [0"),
    ],
    ids=["accelerator", "devices", "limit"],
)
def test_settings_that_lightning_rejects_before_training_give_one_line_and_code_2(fit, config, settings, message):
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    config["trainer"] |= settings
    result = fit(config)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"lightning-rlhf: {message}")


ROLE_STRATEGIES = (
    "Available: auto, rlhf_single, rlhf_ddp, rlhf_fsdp, rlhf_fsdp_offload, rlhf_deepspeed_stage_1, "
    "rlhf_deepspeed_stage_2, rlhf_deepspeed_stage_2_offload, rlhf_deepspeed_stage_3, rlhf_deepspeed_stage_3_offload"
)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "nonsense"}, f"trainer.strategy 'nonsense' is not available. {ROLE_STRATEGIES}"),
        (
            {"strategy": "rlhf_fdsp"},
            f"trainer.strategy 'rlhf_fdsp' is not available; did you mean 'rlhf_fsdp'? {ROLE_STRATEGIES}",
        ),
        ({"strategy": "ddp_spawn"}, f"trainer.strategy 'ddp_spawn' is not available. {ROLE_STRATEGIES}"),
        ({"strategy": "ddp_notebook"}, f"trainer.strategy 'ddp_notebook' is not available. {ROLE_STRATEGIES}"),
        (
            {"strategy": "deepspeed_stage_3_offload_nvme"},
            f"trainer.strategy 'deepspeed_stage_3_offload_nvme' is not available. {ROLE_STRATEGIES}",
        ),
        (
            {"strategy": "deepspeed_stage_1_offload"},
            "trainer.strategy 'deepspeed_stage_1_offload' is not available; did you mean "
            f"'rlhf_deepspeed_stage_3_offload'? {ROLE_STRATEGIES}",
        ),
        (
            {"strategy": "ddp", "num_nodes": 2},
            "trainer.num_nodes is 2, but MASTER_ADDR and MASTER_PORT are not set, and neither torchrun nor SLURM",
        ),
        (
            {"gradient_clip_val": 1.0},
            "trainer.gradient_clip_val is 1.0, but gradients are clipped for each model: set model.init_args.max_grad_",
        ),
        ({"accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches is 4, but gradients are accumulated over mi"),
        ({"max_steps": 0}, "trainer.max_steps is 0, so nothing would be trained: set at least 1"),
        ({"barebones": True}, "trainer.barebones is True, but it disables the logging and the checkpoints"),
    ],
)
def test_unsupported_trainer_setting_is_reported_with_the_supported_one(fit, config, settings, message, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    config["trainer"] |= settings
    result = fit(config)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"lightning-rlhf: {message}")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("LearningRateFinder", {}, "set model.init_args.optimizer.init_args.lr"),
        ("BatchSizeFinder", {}, "set model.init_args.micro_batch_tokens"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1}, "use lightning.pytorch.callbacks.EMAWeightAveraging"),
    ],
)
def test_callbacks_for_automatic_optimization_are_rejected_by_name(fit, config, name, arguments, message):
    config["trainer"]["callbacks"].append({"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": arguments})
    result = fit(config)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"lightning-rlhf: {name} needs automatic optimization of one model")
    assert message in result.err


@pytest.mark.slow
def test_unknown_monitored_metric_gives_one_line_with_the_logged_metrics(fit, config):
    arguments = {"monitor": "val/nothing", "check_on_train_epoch_end": True}
    config["trainer"]["callbacks"].append(
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": arguments}
    )
    result = fit(config)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "val/nothing" in result.err.splitlines()[-1]
    assert "reward/mean" in result.err.splitlines()[-1]


@pytest.mark.slow
def test_configured_progress_bar_is_used_without_a_terminal(fit, config):
    config["trainer"]["callbacks"].append({"class_path": "lightning.pytorch.callbacks.RichProgressBar"})
    assert fit(config).code == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_only_one_process_per_machine_prints_a_mistake(fit, config, monkeypatch, local_rank, lines):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    config["trainer"]["max_step"] = 3
    assert len(fit(config).err.splitlines()) == lines
    del config["trainer"]["max_step"]
    config["trainer"]["max_steps"] = 0
    assert len(fit(config).err.splitlines()) == lines


def test_lightning_errors_during_training_keep_their_traceback(fit, config, monkeypatch):
    def undo(module, batch, batch_idx):
        module.log("reward/mean", "no number")

    monkeypatch.setattr(PPOModule, "training_step", undo)
    with pytest.raises(ValueError, match="values cannot be logged"):
        fit(config)


def with_class(config, part):
    """Return the configuration with the given class of this file."""
    path = f"tests.cli.test_errors.{part}"
    if part == "Buggy":
        config["trainer"]["callbacks"].append({"class_path": path})
    elif part == "BuggyRows":
        config["data"]["init_args"]["train"] = {"class_path": path}
    else:
        config["model"]["class_path"] = path
    return config


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("part", "where", "error"),
    [
        ("Buggy", "self.number = int(text)", "ValueError: invalid literal for int() with base 10: 'seven'"),
        ("BuggyModule", "self.number = int(seven)", "ValueError: invalid literal for int() with base 10: 'seven'"),
        ("BuggyRows", 'self.columns = {}["prompt"]', "KeyError: 'prompt'"),
    ],
)
def test_bug_in_a_user_constructor_shows_its_location(fit, config, part, where, error):
    result = fit(with_class(config, part))
    assert result.code == 2
    *shown, message = result.err.splitlines()
    assert message.startswith("lightning-rlhf: ")
    assert message.endswith(error.partition(": ")[2])
    assert where in [line.strip() for line in shown]
    assert shown[-1] == error


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("settings", [{"minibatch_size": 0}, {"max_grad_norm": -1.0}])
def test_constructor_errors_of_this_package_show_no_traceback(fit, config, settings):
    config["model"]["init_args"] |= settings
    result = fit(config)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1


def test_directory_that_cannot_be_created_is_rejected(fit, config):
    config["trainer"]["default_root_dir"] = "/proc/runs"
    result = fit(config)
    assert result.code == 2
    message = (
        "lightning-rlhf: trainer.default_root_dir '/proc/runs' cannot be created (No such file or directory): set "
    )
    assert result.err.startswith(message)


@pytest.mark.slow
def test_timer_callback_is_accepted_and_written_to_the_configuration(fit, config):
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}
    config["trainer"]["callbacks"].append(timer)
    result = fit(config)
    assert result.code == 0, result.err
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["trainer"]["callbacks"][-1]
    assert saved["init_args"]["interval"] == "step"


class StoreError(Exception):
    """An error of a metric store that derives from no specific built-in error."""


def test_logger_error_of_its_library_gives_one_line_and_code_2(fit, config, monkeypatch):
    def refuse(path):
        raise StoreError("The filesystem tracking backend is in maintenance mode.\nUse sqlite:///mlflow.db.")

    monkeypatch.setattr("lightning.pytorch.loggers.csv_logs.os", SimpleNamespace(fspath=refuse))
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs/x"},
    }
    result = fit(config)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line == (
        "lightning-rlhf: trainer.logger: CSVLogger cannot be created: The filesystem tracking backend is in "
        "maintenance mode. Use sqlite:///mlflow.db."
    )


def test_swa_is_rejected_without_parser_warnings(fit, config):
    config["trainer"]["callbacks"].append(
        {"class_path": "lightning.pytorch.callbacks.StochasticWeightAveraging", "init_args": {"swa_lrs": 1e-3}}
    )
    result = fit(config)
    assert (result.code, result.warned) == (2, [])
    (line,) = result.err.splitlines()
    assert "EMAWeightAveraging" in line


def test_a_mistake_is_the_last_line_when_a_value_replaces_another(fit, config):
    config["model"]["init_args"]["kl_loss"] = {"coef": 0.1}
    result = fit(config, "--model.init_args.kl_loss", "0.04")
    assert result.code == 2
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("lightning-rlhf: model (PPOModule): kl_loss must be a class")
