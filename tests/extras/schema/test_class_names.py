"""Words in the place of a class: of another kind, misspelt, or from another program; and what may be right."""

import importlib
import inspect
from typing import get_args

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lightning_rlhf.extras.commands.check_data import CheckDataCLI
from lightning_rlhf.extras.plan.command import PlanCLI
from lightning_rlhf.extras.schema import check, class_names
from lightning_rlhf.extras.schema.check import OWN_OPTIONS
from lightning_rlhf.extras.schema.class_names import _OWN_FACTORIES
from lightning_rlhf.extras.schema.known import is_class, schedules, schema
from lightning_rlhf.modules.schedules import Kind

CONFIG = """
model:
  class_path: lightning_rlhf.PPOModule
  init_args: {actor: hub/model}
data:
  class_path: lightning_rlhf.PromptDataModule
  init_args: {tokenizer: hub/model, train: hub/data, batch_size: 4}
trainer:
  callbacks:
    - class_path: lightning_rlhf.callbacks.RolloutLoop
      init_args: {rewards: [{function: lightning_rlhf.tasks.addition.exact}]}
"""
SOURCES = "lightning_rlhf.extras.algorithms.advantages_by_source.AdvantagesBySource"
MODEL = "--model.init_args"


@pytest.fixture
def found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def found(*options, config=CONFIG, command=""):
        (tmp_path / "run.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return list(check.mistakes(["--config", "run.yaml", *options], command))

    return found


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "GRPO", "model: GRPO is not a RoleModule; did you mean 'GRPOModule'?"),
        (
            f"{MODEL}.advantages",
            "GRPOModule",
            "model.advantages: GRPOModule is not an AdvantageEstimator; did you",
        ),
        ("--rollout.engine", "VLLM", "trainer.callbacks.engine: no class has the name 'VLLM'; did you mean 'vllm'?"),
        (f"{MODEL}.optimizer", "Adam8", "model.optimizer: no class has the name 'Adam8'; did you mean 'Adam'?"),
        (f"{MODEL}.optimizer", "MuonAdmW", "no class has the name 'MuonAdmW'; did you mean 'MuonAdamW'?"),
        (f"{MODEL}.optimizer", "GRPOModule", "model.optimizer: GRPOModule is not an optimizer"),
        (f"{MODEL}.policy_loss", "GRPOModule", "model.policy_loss: GRPOModule is not a PolicyLoss"),
        (f"{MODEL}.optimizer", "adamw_8bit", "write {class_path: bitsandbytes.optim.AdamW8bit}"),
        (f"{MODEL}.lr_scheduler", "cosine", "schedules.RunSchedule, init_args: {kind: cosine}}"),
        (f"{MODEL}.critic_lr_scheduler", "StepLr", "did you mean 'StepLR'?"),
        (
            "--trainer.callbacks+",
            "EarlyStoping",
            "trainer.callbacks: no class has the name 'EarlyStoping'; did you",
        ),
        ("--trainer.logger", "wandb", "write {class_path: lightning.pytorch.loggers.WandbLogger}"),
        (f"{MODEL}.optimizer.lr", "1e-5,", "model.optimizer: lr must be a number, got '1e-5,'"),
        ("--seed_everything", "abc", "seed_everything must be an integer, true or false, got 'abc'"),
        ("--rollout.stop_token_ids", "[</s>]", "stop_token_ids must be a list of integers or null, got ['</s>']"),
        (f"{MODEL}.optimizer", "1e-4", "optimizer must be a class or its options, got '1e-4': write {lr: 1e-4}"),
        (f"{MODEL}.policy_loss.clip", "0.2", "unknown option 'clip'; did you mean 'clip_range'?"),
        (
            "--rollout.rewards",
            "[reward.py:right]",
            "must have {function: ...} for each reward: write {function: reward.py",
        ),
        (
            f"{MODEL}.policy_loss",
            "ClippedPolicyLos",
            "model.policy_loss: no class has the name 'ClippedPolicyLos'; did",
        ),
        ("--data.init_args.columns", "[prompt]", "columns must be names with values or null, got ['prompt']"),
        ("--resume_from_checkpoint", "last", "(--ckpt_path last)"),
        ("--data.init_args.columns", "{prompts: question}", "unknown field 'prompts'; did you mean 'prompt'?"),
        ("--data.init_args.columns", "{prompt:question}", "write {prompt: question}, with a space"),
    ],
)
def test_a_word_that_cannot_be_meant_is_named(found, option, value, message):
    (mistake,) = found(option, value)
    assert message in mistake


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "GRPOModule"), (f"{MODEL}.optimizer", "AdamW"), (f"{MODEL}.optimizer", "MuonAdamW"),
        (f"{MODEL}.optimizer", "mine.Optimizer"), (f"{MODEL}.lr_scheduler", "LinearLR"),
        ("--trainer.callbacks+", "EMAWeightAveraging"), (f"{MODEL}.lr_scheduler", "RunSchedule"),
        (f"{MODEL}.policy_loss", "losses.py:mine"), (f"{MODEL}.advantages", "GAE"), ("--trainer.logger", "true"),
        ("--trainer.logger", "CSVLogger"), ("--trainer.callbacks+", "ModelCheckpoint"), ("--seed_everything", "true"),
        ("--trainer.callbacks+", "mine.Callback"), ("--rollout.engine", "transformers"), ("--seed_everything", "3"),
        ("--rollout.engine", "TransformersEngine"), (f"{MODEL}.actor", "gpt2"), (f"{MODEL}.optimizer.lr", "1e-5"),
        ("--data.init_args.columns", "{prompt: question, truth: answer}"),
    ],
)  # fmt: skip
def test_a_word_that_may_be_right_is_left_alone(found, option, value):
    required = ("batch_size", "actor is missing", "tokenizer")
    assert [each for each in found(option, value) if not any(part in each for part in required)] == []


def test_option_of_another_module_names_one_that_has_it(found):
    config = yaml.safe_load(CONFIG)
    config["model"] = {"class_path": "SFTModule", "init_args": {"actor": "m", "kl_loss": {"coef": 0.1}}}
    message = "model (SFTModule): unknown option 'kl_loss'; it is an option of CISPOModule and others"
    assert found(config=config) == [message]


def test_classes_of_a_mapping_are_judged(found):
    config = yaml.safe_load(CONFIG)
    estimators = {"math": "GAE", "code": "GRPOModule", "text": {"class_path": "GEA"}}
    config["model"]["init_args"]["advantages"] = {"class_path": SOURCES, "init_args": {"estimators": estimators}}
    wrong, misspelt = found(config=config)
    assert "estimators: GRPOModule is not an AdvantageEstimator" in wrong
    assert "no class has the name 'GEA'; did you mean 'GAE'?" in misspelt


def test_optimizer_of_an_unknown_module_may_be_anything(found):
    config = yaml.safe_load(CONFIG)
    config["model"] = {"class_path": "mine.Module", "init_args": {"optimizer": "adam"}}
    assert [each for each in found(config=config) if "adam" in each] == []


def test_a_mapping_is_no_list(found):
    config = yaml.safe_load(CONFIG)
    config["trainer"]["callbacks"][0]["init_args"]["rewards"] = {"function": "reward.py:right"}
    (mistake,) = found(config=config)
    assert mistake.startswith("trainer.callbacks (RolloutLoop): rewards must be a list or null, got {'function'")


def test_option_beside_init_args_is_named(found):
    config = yaml.safe_load(CONFIG)
    config["model"]["optimizer"] = {"lr": 1e-3}
    assert found(config=config) == ["model: optimizer must be in init_args, not beside it"]


def test_unknown_option_is_named_without_a_configuration_and_for_commands_with_options_of_their_own(found):
    assert list(check.mistakes(["--confg", "x.yaml"], "fit")) == ["unknown option 'confg'; did you mean 'config'?"]
    message = "unknown option 'batch_size'; write --data.init_args.batch_size"
    assert found("--batch_size", "3", command="check-data") == [message]
    assert found("--gpus", "3", command="plan") == []
    assert found("--gpus", "two", command="plan") == ["--gpus must be a whole number of at least 1, got 'two'"]
    assert found("--gps", "3", command="plan") == ["unknown option 'gps'; did you mean 'gpus'?"]


def test_names_of_lightning_and_torch_are_all_there():
    homes = {
        class_names._CALLBACK: (lightning.pytorch.callbacks, lightning.pytorch.callbacks.Callback),
        class_names._LOGGER: (lightning.pytorch.loggers, lightning.pytorch.loggers.Logger),
        "optimizer": (torch.optim, torch.optim.Optimizer),
        "lr_scheduler": (torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
    }
    for kind, (home, base) in homes.items():
        classes = {name: value for name, value in vars(home).items() if inspect.isclass(value)}
        theirs = {name for name, value in classes.items() if issubclass(value, base) and value is not base}
        assert set(class_names.LIBRARY_CLASSES[kind].split()) == {name for name in theirs if name[0] != "_"}


def test_words_for_a_schedule_are_its_kinds():
    assert schedules() == list(get_args(Kind))


@pytest.mark.parametrize("command", ["check-data", "plan"])
def test_own_options_are_those_of_the_commands(command):
    parser = ArgumentParser()
    {"check-data": CheckDataCLI, "plan": PlanCLI}[command].add_arguments_to_parser(None, parser)
    names = {name.removeprefix("--") for name in parser._option_string_actions if name not in ("-h", "--help")}
    assert names == set(OWN_OPTIONS[command])


def test_every_optimizer_and_schedule_of_ours_is_one():
    kinds = {"optimizer": torch.optim.Optimizer, "lr_scheduler": torch.optim.lr_scheduler.LRScheduler}
    ours = [_imported(path) for path, entry in schema()["$defs"].items() if is_class(entry)]
    for factory, base in kinds.items():
        assert sorted(_OWN_FACTORIES[factory]) == sorted(kind.__name__ for kind in ours if issubclass(kind, base))


def _imported(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--data.sampler", "lightning_rlhf.extras.samplers.curriculum.Curriculum"),
        ("--data.sampler", "Mixture"),
        (f"{MODEL}.optimizer", "lightning_rlhf.modules.optimizers.MatrixDecayAdamW"),
        ("--data.train", "lightning_rlhf.tasks.addition.Problems"),
    ],
)
def test_a_class_with_the_methods_of_a_protocol_is_one_of_it(found, option, name):
    assert not [message for message in found(option, name) if "is not a" in message]
