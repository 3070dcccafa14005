"""All mistakes of a configuration are reported together, from the sources of its classes, without importing them."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_rlhf
from lightning_rlhf import callbacks
from lightning_rlhf.calls.references import load_function
from lightning_rlhf.cli.config_mistakes import mistakes
from lightning_rlhf.cli.early_checks import mistakes_of_settings
from lightning_rlhf.cli.merging import merge
from lightning_rlhf.cli.source_classes import Absent, SourceClass, class_named, find_class, find_module

ROOT = Path(__file__).parents[2]
OTHERS = {"tokenizer.yaml", "jobset.yaml", "jobset_engines.yaml"}
CONFIGS = sorted(
    path for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.yaml") if path.name not in OTHERS
)
# Files that are used together with another one.
PARTIAL = re.compile(r"the section '(model|data)' is missing|model \(\w+\): actor is missing")
CLASSES = sorted(
    {
        *(f"lightning_rlhf.{name}" for name in lightning_rlhf.__all__ if name != "__version__"),
        *(f"lightning_rlhf.callbacks.{name}" for name in callbacks.__all__ if name != "complete"),
        *(path for file in CONFIGS for path in re.findall(r"class_path: ([\w.]+\.[A-Z]\w+)\b(?!\.)", file.read_text())),
    }
)

WRONG = """
model:
  class_path: lightning_rlhf.GRPOModule
  init_args:
    actor: m
    minibatch: 3
    kl_loss: {coef: x}
    actor_optimizer: {class_path: torch.optim.Adamw}
data:
  class_path: lightning_rlhf.PromptDataModule
  init_args: {train: x.jsonl}
trainer:
  max_step: 3
  strategy: {class_path: rlhf_single}
  callbacks:
    - class_path: lightning_rlhf.callbacks.RolloutLoop
      init_args: {rewards: [{function: "reward.py:rihgt"}], val_metric: right, engine: TransformersEngine}
    - lightning_rlhf.callbacks.RolloutLoop
"""
MISTAKES = [
    "model (GRPOModule): unknown option 'minibatch'; did you mean 'minibatch_size'?",
    "model.actor_optimizer: 'Adamw' was not found in torch.optim; did you mean 'AdamW'?",
    "unknown option 'trainer.max_step'; did you mean 'max_steps'?",
    "trainer.strategy: class_path must be a class, got 'rlhf_single', the name of a strategy: write trainer.strategy: "
    "rlhf_single, or the class_path of a strategy, one of ",
    "reward function 'reward.py:rihgt': 'rihgt' was not found in reward.py; did you mean 'right'?",
    "data (PromptDataModule): tokenizer is missing",
    "model.kl_loss (KLTerm): coef must be a number, got 'x'",
    "no data at 'x.jsonl': expected an existing ",
    "trainer.callbacks has 2 RolloutLoops, allowed: one; put all rewards into its list of rewards",
    "val_metric must be the name of a reward, one of ['rihgt'], got 'right'",
]


def test_all_mistakes_are_reported_together_before_torch_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text(WRONG)
    (tmp_path / "reward.py").write_text("import json\n\ndef right(completions):\n    return []\n")
    program = (
        "import sys; from lightning_rlhf.__main__ import main; sys.argv = ['x', 'fit', '--config', 'run.yaml']; "
        "code = main(); print('torch' in sys.modules, code)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.split() == ["False", "2"]
    first, *lines = ended.stderr.splitlines()
    assert first == "lightning-rlhf: 10 mistakes in the configuration:"
    assert [line.strip()[: len(message)] for line, message in zip(lines, MISTAKES, strict=True)] == MISTAKES


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_read_from_the_source_equal_those_of_the_class(name):
    result = find_class(name)
    assert isinstance(result, SourceClass)
    kind = load_function(name)
    assert (result.module.name, result.name) == (kind.__module__, kind.__name__)
    expected = dict(inspect.signature(kind).parameters)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter, entry in expected.items():
        if result.parameters and entry.kind not in variadic:
            assert result.parameters[parameter].is_required == (entry.default is entry.empty)
    if not any(item.kind in variadic for item in expected.values()):
        assert set(result.parameters) == set(expected)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configurations_have_no_mistakes(path, monkeypatch):
    monkeypatch.syspath_prepend(str(path.parent))
    assert [mistake for mistake in mistakes(yaml.safe_load(path.read_text())) if not PARTIAL.match(mistake)] == []


ALGORITHMS = sorted((ROOT / "configs/algorithms").glob("*.yaml"))


@pytest.mark.parametrize("path", [path for path in ALGORITHMS if path.stem != "base"], ids=lambda path: path.stem)
def test_algorithm_with_its_shared_base_configuration_has_no_mistakes(path):
    base, instance = (yaml.safe_load(file.read_text()) for file in (ROOT / "configs/algorithms/base.yaml", path))
    merged = merge(base, instance)
    assert [*mistakes(merged), *mistakes_of_settings(merged)] == []


@pytest.mark.parametrize("kind", ["GRPOModule", "RLOOModule"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, "policy_loss 3: expected the name of a class such as ReinforceLoss, or of a function such as losses.py:my"),
        ("ReinforceLos", "policy_loss 'ReinforceLos': expected the name of a class such as ReinforceLoss, or of a"),
        ("losses.py:mine", "policy_loss 'losses.py:mine': 'mine' was not found in losses.py; available: yours"),
        ("losses.py:yours", None),
        ("ReinforceLoss", None),
        ({"class_path": "ReinforceLoss"}, None),
    ],
    ids=str,
)
def test_unknown_policy_losses_are_reported(tmp_path, monkeypatch, kind, loss, message):
    monkeypatch.chdir(tmp_path)
    find_module.cache_clear()
    Path("losses.py").write_text("def yours(tokens):\n    return -tokens.log_ratio\n")
    model = {"class_path": f"lightning_rlhf.{kind}", "init_args": {"actor": "x", "policy_loss": loss}}
    data = {"class_path": "lightning_rlhf.PromptDataModule", "init_args": {"train": "x", "tokenizer": "x"}}
    result = list(mistakes({"model": model, "data": data}))
    assert len(result) == (message is not None)
    assert message is None or result[0].startswith(f"model ({kind}): {message}")


@pytest.mark.parametrize(
    ("source", "parameters"),
    [
        ("from lightning_rlhf import PPOModule\nclass Mine(PPOModule):\n    pass\n", ["actor", "critic", "vf_coef"]),
        ("import lightning_rlhf as l\nclass Mine(l.GRPOModule):\n    def __init__(self, *, more=1, **k):\n        "
         "super().__init__(**k)\n", ["more", "actor"]),
        ("import lightning_rlhf as l\nclass Mine(l.GRPOModule):\n    def __init__(self, *a, more=1, **k):\n        "
         "super().__init__(*a, **k)\n", ["more", "actor"]),
        ("from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mine:\n    a: int\n    b: str = ''\n",
         ["a", "b"]),
        ("def make():\n    class A: pass\n    return A\nclass Mine(make()):\n    pass\n", []),
    ],
)  # fmt: skip
def test_user_classes_are_read_too(tmp_path, monkeypatch, source, parameters):
    monkeypatch.syspath_prepend(str(tmp_path))
    find_module.cache_clear()
    (tmp_path / "users_own.py").write_text(source)
    known = find_class("users_own.Mine").parameters
    assert set(parameters) <= set(known)
    assert bool(known) == bool(parameters)
    assert isinstance(find_class("users_own.Yours"), Absent)


def test_undecidable_values_are_not_reported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    find_module.cache_clear()
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    return int\n")
    (tmp_path / "broken.py").write_text("class A(:\n")
    assert find_class("lazy.Anything") is None
    assert find_class("broken.A") is None
    assert find_class("math.Anything") is None  # in C
    assert class_named("NoSuchClassAnywhere") is None


def test_short_class_name_is_accepted():
    config = yaml.safe_load(WRONG)
    assert not [mistake for mistake in mistakes(config) if "engine" in mistake]
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = "GRPOModule"
    assert [mistake for mistake in mistakes(config) if "engine must be 'auto' or a class" in mistake]
