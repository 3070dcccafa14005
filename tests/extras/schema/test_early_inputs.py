"""Mistakes in files and inconsistent settings are found before torch is imported."""

import contextlib
import copy

import pytest
import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.schema import check
from lightning_rlhf.extras.schema.inputs import mistakes_of_inputs as find_mistakes
from lightning_rlhf.launch_environment import Machine
from lightning_rlhf.strategies.names import REGISTERED

LOOP = {
    "class_path": "lightning_rlhf.callbacks.RolloutLoop",
    "init_args": {"rewards": [{"function": "reward.py:right"}], "group_size": 4, "val_metric": "right"},
}
RIGHT = {
    "model": {"class_path": "lightning_rlhf.GRPOModule", "init_args": {"actor": "hub/model", "minibatch_size": 8}},
    "data": {
        "class_path": "lightning_rlhf.PromptDataModule",
        "init_args": {"tokenizer": "hub/model", "train": "train.jsonl", "val": "train.jsonl", "batch_size": 4},
    },
    "trainer": {"max_steps": 1, "callbacks": [LOOP]},
}
OWN_CALLBACK = "class Mine:\n    def __init__(self):\n        self.provides_rollouts = True\n"
OWN_MODULE = "from lightning_rlhf import GRPOModule\n\nclass Mine(GRPOModule):\n    pass\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 6)
    (tmp_path / "renamed.jsonl").write_text('{"instruction": "a", "answer": "b"}\n' * 6)
    (tmp_path / "reward.py").write_text("def right(completions, answer):\n    return [0.0] * len(completions)\n")
    (tmp_path / "file").write_text("")
    return tmp_path


def changed(path, value):
    """Return the valid configuration with one changed value; digits in the path index lists."""
    config = copy.deepcopy(RIGHT)
    *sections, last = path.split(".")
    inner = config
    for section in sections:
        inner = inner[int(section) if section.isdigit() else section]
    inner[last] = value
    return config


def found(config, command="fit"):
    """Return the mistakes in the files and settings of a configuration."""
    return list(find_mistakes(config, command))


def quantized(**options):
    """Return a source with weights in 4 bits."""
    arguments = {"path": "owner/of-the-hub", "quantization": "nf4", **options}
    return {"class_path": "lightning_rlhf.Pretrained", "init_args": arguments}


CASES = [
    ("ckpt_path", "runs/x.ckpt", "no checkpoint at runs/x.ckpt"),
    ("trainer.default_root_dir", "file", "trainer.default_root_dir 'file' is a file"),
    ("trainer.strategy", "rlhf_fsdq", "did you mean 'rlhf_fsdp'?"),
    ("model.init_args.actor", "./nowhere", "no model at './nowhere'"),
    (
        "model.init_args.ref",
        {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": "./nowhere"}},
        "no model",
    ),
    (
        "model.init_args.actor",
        {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": "a/b", "adapter": "./nowhere"}},
        "no adapter at './nowhere': adapter_config.json is missing",
    ),
    (
        "model.init_args.actor",
        {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": "a/b", "quantization": "nf4"}},
        "the actor's weights are stored in nf4 and cannot be trained: give its source lora, such as",
    ),
    ("data.init_args.val", ["train.jsonl", "val.jsonl"], "no data at 'val.jsonl'"),
    (
        "data.init_args.train",
        "renamed.jsonl",
        "set data.init_args.columns: {prompt: instruction}",
    ),
    ("data.init_args.batch_size", 8, "the training data have only 6 usable rows: use a batch_size of at most 6"),
    ("data.init_args.batch_size", "8", "the training data have only 6 usable rows"),
    ("model.init_args.minibatch_size", 12, "minibatch_size 12 does not divide the 16 responses of a step"),
    ("trainer.callbacks.0.init_args.group_size", 1, "GRPO compares the responses to one prompt"),
    ("trainer.callbacks.0.init_args.val_metric", "rihgt", "val_metric must be the name of a reward, one of ['right']"),
    ("trainer.callbacks", [], "GRPOModule trains on rollouts, and no callback provides them"),
    ("trainer.callbacks", [LOOP, LOOP], "trainer.callbacks has 2 RolloutLoops, allowed: one"),
]
ACCEPTED = [
    ("ckpt_path", "last"),
    ("model.init_args.actor", "owner/of-the-hub"),
    ("model.init_args.ref", "actor"),
    ("model.init_args.actor", quantized(lora={"rank": 8, "alpha": 16})),
    ("model.init_args.actor", quantized(adapter="owner/adapter")),
    ("model.init_args.ref", quantized()),
    ("data.init_args.train", "owner/data"),
    ("data.init_args.train", "https://example.org/x.jsonl.gz"),
    ("data.init_args.columns", {"ground_truth": "answer"}),
    ("trainer.callbacks", [{"class_path": "own_callback.Mine"}]),
    ("trainer.callbacks", [{"class_path": "unknown_package.Mine"}]),
    ("trainer.callbacks.0.init_args.dynamic_sampling", {"max_batches": 3}),
    ("trainer.strategy", "ddp"),
    ("trainer.max_time", "00:00:18:00"),
    ("trainer.max_time", "{minutes: 18}"),
    ("trainer.max_time", {"minutes": 18}),
    ("trainer.accelerator", "cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), CASES)
def test_mistake_is_found(path, value, message):
    result = found(changed(path, value))
    assert len(result) == 1
    assert message in result[0]


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_possibly_valid_settings_are_accepted(path, value, folder):
    (folder / "own_callback.py").write_text(OWN_CALLBACK)
    assert found(changed(path, value)) == []


def test_custom_module_may_need_no_loop(folder):
    (folder / "own_module.py").write_text(OWN_MODULE)
    config = changed("model.class_path", "own_module.Mine")
    config["trainer"]["callbacks"] = []
    assert found(config) == []


def test_only_fit_needs_a_batch_of_training_rows():
    config = changed("data.init_args.batch_size", 8)
    assert found(config, "validate") == []
    assert len(found(config)) == 1
    config["data"]["init_args"]["sampler"] = {"class_path": "lightning_rlhf.extras.samplers.curriculum.Curriculum"}
    assert found(config) == []


def paths_of(value, path=()):
    """Yield the path of each value in a configuration."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*path, str(key)))


@pytest.mark.parametrize(
    "value", [None, 3, -1.5, True, "", "{", "~", "\t", [], [None], [[3]], {}, {"class_path": 3}, {3: 4}]
)
def test_wrong_value_at_any_position_raises_nothing(folder, value):
    full = changed("data.init_args.columns", {"ground_truth": "answer"})
    full |= {"ckpt_path": "last"}
    full["trainer"] |= {"strategy": "ddp", "accelerator": "cpu", "max_time": "00:01:00:00", "default_root_dir": "runs"}
    for path in paths_of(full):
        if path:
            config = copy.deepcopy(full)
            inner = config
            for key in path[:-1]:
                inner = inner[int(key) if isinstance(inner, list) else key]
            inner[int(path[-1]) if isinstance(inner, list) else path[-1]] = value
            (folder / "run.yaml").write_text(yaml.safe_dump(config))
            with contextlib.suppress(UsageError):
                check.mistakes(["--config", "run.yaml"], "fit")


def test_commands_without_a_run_do_not_need_its_files(folder):
    (folder / "run.yaml").write_text(yaml.safe_dump(changed("data.init_args.train", "missing.jsonl")))
    assert check.mistakes(["--config", "run.yaml"], "") == {}
    assert "no data at 'missing.jsonl'" in "".join(check.mistakes(["--config", "run.yaml"], "fit"))


def test_strategy_names_equal_those_of_their_classes():
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_rlhf.strategies import registry

    for name, (kind, options) in REGISTERED.items():
        assert StrategyRegistry[name]["strategy"] is getattr(registry, kind)
        assert StrategyRegistry[name]["init_params"] == options


@pytest.mark.parametrize("visible_devices", ["", "0"])
def test_missing_gpu_is_reported_with_its_option(visible_devices, monkeypatch, folder):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    real = Machine.here
    (folder / "nvidia0").touch()
    monkeypatch.setattr(Machine, "here", lambda environ: real(environ, devices=folder))
    result = [message for message, _ in check._wrong(changed("trainer.accelerator", "gpu"))]
    message = ["trainer.accelerator is 'gpu', but this machine has no NVIDIA GPU: remove it, or set cpu"]
    assert result == ([] if visible_devices else message)
