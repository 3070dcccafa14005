"""Mistakes in a configuration are printed before torch is imported, and the parser alone ends a run."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_rlhf.cli.config_files import read_yaml
from lightning_rlhf.cli.merging import merge
from lightning_rlhf.extras.schema import check
from lightning_rlhf.extras.schema.inputs import mistakes_of_settings
from lightning_rlhf.extras.schema.known import definition, find

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = [
    path
    for folder in ("configs", "examples")
    for path in sorted((ROOT / folder).rglob("*.yaml"))
    if "jobset" not in path.name and path.name != "tokenizer.yaml"
]
ALGORITHMS = sorted(path for path in (ROOT / "configs/algorithms").glob("*.yaml") if path.stem != "base")
WRONG = """
model:
  class_path: lightning_rlhf.GRPOModule
  init_args:
    actor: m
    minibatch: 3
    kl_loss: {coef: x}
data:
  class_path: lightning_rlhf.PromptDataModule
  init_args: {train: x.jsonl}
trainer:
  max_step: 3
  strategy: {class_path: rlhf_single}
  callbacks:
    - class_path: lightning_rlhf.callbacks.RolloutLoop
      init_args: {rewards: [{function: "reward.py:right"}], val_metric: rihgt, engine: TransformersEngine}
    - lightning_rlhf.callbacks.RolloutLoop
"""
MISTAKES = [
    "unknown option 'trainer.max_step'; did you mean 'max_steps'?",
    "model (GRPOModule): unknown option 'minibatch'; did you mean 'minibatch_size'?",
    "trainer.strategy: class_path must be a class, got 'rlhf_single', the name of a strategy: write trainer.strategy: "
    "rlhf_single",
    "data (PromptDataModule): tokenizer is missing",
    "model.kl_loss (KLTerm): coef must be a number, got 'x'",
    "no data at 'x.jsonl': expected an existing ",
    "trainer.callbacks has 2 RolloutLoops, allowed: one; put all rewards into its list of rewards",
    "val_metric must be the name of a reward, one of ['right'], got 'rihgt'; did you mean 'right'?",
]
BASE = """
model:
  class_path: lightning_rlhf.PPOModule
  init_args:
    actor: {class_path: lightning_rlhf.FromConfig, init_args: {architecture: {model_type: llama}}}
    minibatch_size: 4
data:
  class_path: lightning_rlhf.PromptDataModule
  init_args: {tokenizer: hub/model, train: hub/data, batch_size: 4}
"""
TRAINER = """
callbacks:
  - class_path: lightning_rlhf.callbacks.RolloutLoop
    init_args: {rewards: [{function: lightning_rlhf.tasks.addition.exact}]}
"""
OWN = """
from lightning_rlhf import PPOModule, PromptDataModule
class MyPPO(PPOModule):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
class MyData(PromptDataModule):
    def __init__(self, *a, extra=0, **k):
        super().__init__(*a, **k)
"""


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return the mistakes of a configuration with options."""
    monkeypatch.chdir(tmp_path)

    def found(config, *options, command=""):
        Path("run.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return list(check.mistakes(["--config", "run.yaml", *options], command))

    return found


def with_trainer(text=TRAINER):
    return BASE + "trainer:\n" + "".join(f"  {line}\n" for line in text.strip().splitlines())


def test_all_mistakes_are_printed_together_before_torch_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text(WRONG)
    program = (
        "import sys; from lightning_rlhf.cli.early import check_early; "
        "check_early(['--config', 'run.yaml'], 'fit', before=True); "
        "print([name for name in ('torch', 'transformers', 'lightning', 'datasets', 'numpy') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "[]\n"
    first, *lines = ended.stderr.splitlines()
    assert first == "lightning-rlhf: 8 mistakes in the configuration:"
    assert [line.strip()[: len(message)] for line, message in zip(lines, MISTAKES, strict=True)] == MISTAKES


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (with_trainer(), ["--trainer.callbacks+=lightning_rlhf.callbacks.Report"]),
        (with_trainer().replace("lightning_rlhf.PPOModule", "own.MyPPO"), []),
        (with_trainer().replace("lightning_rlhf.PromptDataModule", "own.MyData"), ["--data.extra=3"]),
        (BASE, ["--trainer", "trainer.yaml"]),
        (with_trainer(TRAINER.replace("  - ", "    ")), []),
        (with_trainer(), ["--model.optimizer=AdamW", "--model.optimizer.lr=0.1"]),
        (with_trainer().replace("lightning_rlhf.PPOModule", "PPOModule"), ["--model.target_kl=null"]),
    ],
    ids=["append", "own module", "own data", "trainer in a file", "one callback", "short name", "short module"],
)
def test_nothing_is_printed_about_what_may_be_right(found, tmp_path, config, options):
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    (tmp_path / "own.py").write_text(OWN)
    assert found(config, *options, command="fit") == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configurations_have_no_mistakes(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = ["--config", str(path)]
    if path in ALGORITHMS:
        files = ["--config", str(ROOT / "configs/algorithms/base.yaml"), *files]
    is_part = "'model' is missing", "'data' is missing", "actor is missing"
    assert [each for each in check.mistakes(files, "") if not any(part in each for part in is_part)] == []


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_sizes_of_an_algorithm_belong_together(path):
    assert (
        list(mistakes_of_settings(merge(read_yaml(ROOT / "configs/algorithms/base.yaml"), read_yaml(path), find))) == []
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.minibatch_size=x", "model (PPOModule): minibatch_size must be an integer or null, got 'x'"),
        ("--model.minibatch_size=1.5", "model (PPOModule): minibatch_size must be an integer or null, got '1.5'"),
        ("--trainer.max_steps=1e3", "trainer.max_steps must be an integer, got '1e3': write 1000"),
        ("--model.class_path=GRPOTrainer", "model: class_path must be package.Class, got 'GRPOTrainer'; did you mean "
         "'GRPOModule'?"),
        ("--model=KTOTrainer", "model: class_path must be package.Class, got 'KTOTrainer'; did you mean 'KTOModule'?"),
        ("--model.vf_coef=true", "model (PPOModule): vf_coef must be a number, got 'true'"),
        ("--model.target_kl=[1]", "model (PPOModule): target_kl must be a number or null, got [1]"),
        ("--model.kl_loss=0.01", "model (PPOModule): kl_loss must be a class (class_path: package.Class), got '0.01': "
         "write kl_loss: {coef: 0.01}"),
        ("--trainer.callbacks.rewards=3", "trainer.callbacks (RolloutLoop): rewards must be a list or null, got '3'"),
        ("--rollout.engine=sglang", "trainer.callbacks (RolloutLoop): engine must be one of 'auto', 'vllm', "
         "'transformers' or a class (class_path: package.Class), got 'sglang'"),
        ("--trainer.callbacks.environment.parser=hermes", "trainer.callbacks.environment (EnvironmentSettings): parser "
         "must be a class (class_path: package.Class) or null, got 'hermes'; available: lightning_rlhf.environments."),
        ("--model.class_path=lightning_rlhf.rewards.code.X", "model: lightning_rlhf.rewards.code.X is now "
         "lightning_rlhf.extras.sandbox.code.X"),
        ("--trainer.logger=lightning_rlhf.loggers.TrackioLogger", "trainer.logger: "
         "lightning_rlhf.loggers.TrackioLogger is now lightning_rlhf.extras.loggers.trackio.TrackioLogger"),
    ],
)  # fmt: skip
def test_mistakes_are_described(found, option, message):
    config = yaml.safe_load(with_trainer())
    config["trainer"]["callbacks"][0]["init_args"]["environment"] = {"class_path": "EnvironmentSettings"}
    assert [each[: len(message)] for each in found(config, option) if "factory is missing" not in each] == [message]


def test_reference_of_a_reward_is_written_as_a_list():
    option = definition("RolloutLoop")["properties"]["rewards"]
    message = check.wrong_value("rewards", "reward.py:right", option)
    assert message.endswith("got 'reward.py:right': write rewards: [{function: reward.py:right}]")


def test_a_part_of_a_configuration_can_be_printed(found):
    part = {"trainer": {"max_steps": 3, "default_root_dir": "run.yaml"}}
    assert found(part, "--print_config", command="fit") == []
    assert len(found(part, command="fit")) == 3
    assert found(part, "--print_config", "--trainer.max_step=3", command="fit") == [MISTAKES[0]]
