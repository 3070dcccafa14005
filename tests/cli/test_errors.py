"""Whose error it is: what Lightning refuses is a sentence, and a bug in a user's class can be found."""

import sys
from collections.abc import Iterator

import pytest
from lightning.pytorch import Callback

from lightning_rlhf import PPOModule
from lightning_rlhf.data.rows import Row


class Buggy(Callback):
    def __init__(self, text: str = "seven"):
        self.number = int(text)


class BuggyRows:
    """One of two types that ``train`` may have, so that jsonargparse keeps the other one's error."""

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
    sys.modules.setdefault("tests.cli.test_errors", sys.modules[__name__])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"accelerator": "tpu"}, "Requirement 'torch_xla"),
        ({"devices": 0}, "`Trainer(devices=0)` value is not a valid input using cpu accelerator."),
        ({"limit_train_batches": 1.5}, "You have passed invalid value 1.5 for limit_train_batches, it has to be in [0"),
        ({"strategy": "nonsense"}, "You selected an invalid strategy name: `strategy='nonsense'`."),
        ({"gradient_clip_val": 1.0}, "Automatic gradient clipping is not supported for manual optimization. Remove `T"),
        (
            {"val_check_interval": 100},
            "`val_check_interval` (100) must be less than or equal to the number of the trai",
        ),
    ],
    ids=["accelerator", "devices", "limit", "strategy", "clipping", "interval"],
)
def test_what_lightning_refuses_before_training_is_one_line_and_code_2(fit, config, settings, told):
    config["data"]["init_args"]["val"] = config["data"]["init_args"]["train"]
    config["trainer"] |= settings
    result = fit(config)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"lightning-rlhf: {told}")


def test_what_lightning_raises_in_training_keeps_its_traceback(fit, config, monkeypatch):
    def undo(module, batch, batch_idx):
        module.log("reward/mean", "no number")

    monkeypatch.setattr(PPOModule, "training_step", undo)
    with pytest.raises(ValueError, match="values cannot be logged"):
        fit(config)


def named(config, part):
    """The configuration with a class of this file in it."""
    path = f"tests.cli.test_errors.{part}"
    if part == "Buggy":
        config["trainer"]["callbacks"].append({"class_path": path})
    elif part == "BuggyRows":
        config["data"]["init_args"]["train"] = {"class_path": path}
    else:
        config["model"]["class_path"] = path
    return config


@pytest.mark.parametrize(
    ("part", "where", "error"),
    [
        ("Buggy", "self.number = int(text)", "ValueError: invalid literal for int() with base 10: 'seven'"),
        ("BuggyModule", "self.number = int(seven)", "ValueError: invalid literal for int() with base 10: 'seven'"),
        ("BuggyRows", 'self.columns = {}["prompt"]', "KeyError: 'prompt'"),
    ],
)
def test_a_bug_in_a_user_s_constructor_shows_where_it_is(fit, config, part, where, error):
    result = fit(named(config, part))
    assert result.code == 2
    *shown, sentence = result.err.splitlines()
    assert sentence.startswith("lightning-rlhf: ")
    assert sentence.endswith(error.partition(": ")[2])
    assert where in [line.strip() for line in shown]
    assert shown[-1] == error


@pytest.mark.parametrize("settings", [{"minibatch_size": 0}, {"max_grad_norm": -1.0}])
def test_a_refusal_of_a_constructor_of_ours_shows_no_traceback(fit, config, settings):
    config["model"]["init_args"] |= settings
    result = fit(config)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
