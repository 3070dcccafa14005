"""The parser alone decides whether a run starts: the early check prints, and only what it knows."""

from pathlib import Path

import pytest
import yaml

from lightning_rlhf.cli.main import RLHFCLI
from lightning_rlhf.extras.schema import check

OWN = """
from lightning_rlhf import PPOModule, PromptDataModule

class MyPPO(PPOModule):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

class MyData(PromptDataModule):
    def __init__(self, *a, extra: int = 0, **k):
        super().__init__(*a, **k)
"""


def _print_callbacks(cli, subcommand):
    print(*(type(callback).__name__ for callback in cli.trainer.callbacks))


@pytest.fixture
def start(fit, monkeypatch, tmp_path):
    """Run ``fit`` up to its first step, with classes of a user beside the configuration."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_of_star.py").write_text(OWN)
    monkeypatch.setattr(RLHFCLI, "_run_subcommand", _print_callbacks)
    return fit


@pytest.mark.parametrize(
    ("section", "kind", "options"), [("model", "MyPPO", {}), ("data", "MyData", {"extra": 3})], ids=["model", "data"]
)
def test_a_users_class_may_pass_on_all_arguments(start, config, section, kind, options):
    config[section]["class_path"] = f"own_of_star.{kind}"
    config[section]["init_args"] |= options
    result = start(config)
    assert (result.code, result.err) == (0, "")


def test_a_callback_may_be_appended_from_the_command_line(start, config):
    result = start(config, "--trainer.callbacks+=lightning_rlhf.callbacks.Report")
    assert (result.code, result.err) == (0, "")
    assert {"RolloutLoop", "Report"} <= set(result.out.split())


def test_one_callback_needs_no_list(start, config):
    (config["trainer"]["callbacks"],) = config["trainer"]["callbacks"]
    result = start(config)
    assert (result.code, result.err) == (0, "")


def test_a_section_may_be_a_file_of_its_own(start, config):
    Path("trainer.yaml").write_text(yaml.safe_dump(config.pop("trainer")))
    result = start(config, "--trainer", "trainer.yaml")
    assert (result.code, result.err) == (0, "")


def test_a_run_with_a_wrongly_printed_mistake_starts(start, config, monkeypatch):
    monkeypatch.setattr(check, "mistakes", lambda arguments, command: {"a wrong line": ("max_steps",)})
    result = start(config)
    assert (result.code, result.err) == (0, "lightning-rlhf: a wrong line\n")


def test_an_error_about_another_option_is_printed_beside_the_mistakes(start, config, monkeypatch):
    monkeypatch.setattr(check, "mistakes", lambda arguments, command: {"a wrong line": ("max_steps",)})
    config["model"]["init_args"]["minibatch_size"] = "many"
    result = start(config)
    assert result.code == 2
    first, second = result.err.splitlines()
    assert first == "lightning-rlhf: a wrong line"
    assert "minibatch_size" in second
