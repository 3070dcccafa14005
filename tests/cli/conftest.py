"""Fixtures for tests of the command line: a configuration that runs in a second, and a runner in this process."""

import copy
import logging
import string
import warnings
from types import SimpleNamespace

import pytest
import yaml

from lightning_rlhf import launch_environment
from lightning_rlhf.cli import main
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 18,
    "hidden_size": 32,
    "head_dim": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PPO = {
    "seed_everything": 3,
    "model": {
        "class_path": "lightning_rlhf.PPOModule",
        "init_args": {
            "actor": {"class_path": "lightning_rlhf.FromConfig", "init_args": {"architecture": LLAMA}},
            "minibatch_size": 4,
        },
    },
    "data": {
        "class_path": "lightning_rlhf.PromptDataModule",
        "init_args": {
            "tokenizer": {
                "class_path": "lightning_rlhf.data.tokenizers.CharacterTokenizer",
                "init_args": {"characters": "0123456789+=: "},
            },
            "train": {"class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": 12}},
            "batch_size": 4,
            "max_tokens": 16,
        },
    },
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 2,
        "callbacks": [
            {
                "class_path": "lightning_rlhf.callbacks.RolloutLoop",
                "init_args": {
                    "rewards": [{"function": "lightning_rlhf.tasks.addition.exact"}],
                    "engine": "lightning_rlhf.rollout.transformers.TransformersEngine",
                    "max_response_tokens": 4,
                },
            }
        ],
        "default_root_dir": "runs/tiny",
    },
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Run in a temporary directory and restore the loggers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-rlhf"])
    loggers = [logging.getLogger(name) for name in ("lightning_rlhf", "lightning.pytorch", "lightning.fabric")]
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    loggers[0].handlers = []  # a handler of an earlier test writes to a stream that is gone
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture
def config():
    """A copy of the configuration, which tests change."""
    return copy.deepcopy(PPO)


@pytest.fixture
def cli(capsys):
    """Run the command line; returns ``code``, ``out``, ``err`` and the warnings in ``warned``."""

    def cli(*arguments):
        launch_environment.apply()  # as __main__ does
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as warned:
            warnings.resetwarnings()  # what Python shows outside of tests
            warnings.simplefilter("default")
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
            try:
                code = main.run(list(arguments))
            except SystemExit as end:
                code = end.code
        shown = capsys.readouterr()
        return SimpleNamespace(code=code, out=shown.out, err=shown.err, warned=[str(w.message) for w in warned])

    return cli


@pytest.fixture
def fit(cli, tmp_path):
    """Run ``fit`` with a configuration."""

    def fit(config, *arguments):
        path = tmp_path / "config.yaml"
        path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return cli("fit", "--config", str(path), *arguments)

    return fit


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory):
    """A directory with a small chat model for printable characters, which vLLM's attention on CPUs supports."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    changes = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
    FromConfig({**LLAMA, **changes}, seed=0).causal().save_pretrained(directory)
    tokenizer = CharacterTokenizer((string.printable[:95] + "\n")[:96]).load()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory
