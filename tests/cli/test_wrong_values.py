"""Messages about values of the wrong type."""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from jsonargparse.typing import Path_fr, PositiveInt

from lightning_rlhf.cli.config_files import read_yaml
from lightning_rlhf.cli.config_mistakes import wrong_values
from lightning_rlhf.cli.source_classes import find_class
from lightning_rlhf.cli.wrong_values import wrong_value
from lightning_rlhf.objectives.base import PolicyLoss


class Colour(Enum):
    red = 1


ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path
    for folder in ("configs", "examples")
    for path in (ROOT / folder).rglob("*.yaml")
    if path.name != "tokenizer.yaml"
)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (3, int), ("3", int), (3, float), ("1e-3", float), ("true", bool), (None, int | None), ("null", int | None),
        ("text", str), ("7", str), ("a", Literal["a", "b"]), (2, Literal["a"] | int), ("torch.optim.SGD", PolicyLoss),
        ({"class_path": "x"}, PolicyLoss), ("anything", Any), ("anything", None), ("anything", "NotEvaluated"),
        ("[1]", list[int]), ([], list[int]), ({}, dict[str, int]), ("x", Callable[[int], int]), ("x", Path),
        (True, bool | str), ("red", Colour), (3, PositiveInt), ("x", Path_fr),
    ],
)  # fmt: skip
def test_matching_value_has_no_message(value, annotation):
    assert wrong_value("name", value, annotation) is None


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("x", int, "name must be an integer, got 'x'"),
        (1.5, int, "name must be an integer, got 1.5"),
        (True, int, "name must be an integer, got True"),
        (False, float, "name must be a number, got False"),
        (1, bool, "name must be true or false, got 1"),
        (3, str, "name must be a text, got 3"),
        (None, str, "name must be a text, got None"),
        ([1], float | None, "name must be a number or null, got [1]"),
        ("c", Literal["a", "b"], "name must be one of 'a', 'b', got 'c'"),
        ("c", Literal["a"] | Literal["b"] | int, "name must be one of 'a', 'b' or an integer, got 'c'"),
        ("fast", float | torch.Tensor, "name must be a number, got 'fast'"),
        ("x", list[str] | None, "name must be a list or null, got 'x'"),
        (3, dict[str, int], "name must be names with values, got 3"),
        ("x" * 300, int, f"name must be an integer, got '{'x' * 99}..."),
    ],
)
def test_mismatch_is_described(value, annotation, message):
    assert wrong_value("name", value, annotation) == message


def test_classes_that_an_option_accepts_are_listed():
    parser = find_class("lightning_rlhf.environments.settings.EnvironmentSettings").parameters["parser"]
    message = wrong_value("parser", "hermes", parser.annotation)
    assert message.startswith("parser must be a class (class_path: package.Class) or null, got 'hermes'; available: ")
    names = message.partition("available: ")[2].split(", ")
    instance = ("Function", "JSON", "Marked", "Tokenizer", "VLLM")
    assert names == [f"lightning_rlhf.environments.{name}ToolCalls" for name in instance]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_values_of_shipped_configurations_match(path):
    assert list(wrong_values(read_yaml(path))) == []


@pytest.mark.parametrize(
    ("key", "value", "short"),
    [
        ("kl_loss", 0.01, "kl_loss: {coef: 0.01}"),
        ("kl_loss", "0.01", "kl_loss: {coef: 0.01}"),  # of the command line
        ("advantages", 3, None),
    ],
)
def test_plain_value_for_a_class_names_its_first_option_if_it_fits(key, value, short):
    model = {"class_path": "lightning_rlhf.GRPOModule", "init_args": {"actor": "x", key: value}}
    (message,) = wrong_values({"model": model})
    assert message.endswith(f": write {short}") if short else "write" not in message


def test_reference_of_a_reward_is_written_as_a_list():
    loop = {"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": {"rewards": "reward.py:right"}}
    (message,) = wrong_values({"trainer": {"callbacks": [loop]}})
    assert message.endswith("got 'reward.py:right': write rewards: [{function: reward.py:right}]")
