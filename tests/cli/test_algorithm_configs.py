"""Every algorithm has a configuration that runs, a page that agrees with it, and a lower bound for its result."""

import re

import pytest
import yaml

from lightning_rlhf.cli.main import RLHFCLI
from lightning_rlhf.extras.algorithms.group_advantages import GDPO
from lightning_rlhf.extras.algorithms.sequence_policy_losses import GSPOLoss
from lightning_rlhf.extras.algorithms.verl_corrections import VerlCorrection
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, SequenceMeanTokenSum
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.objectives.resampling import ScoreResampling
from tests.algorithm_tables import BASE, CONFIGS, ROOT, arguments, bounds, pages, values
from tests.cli.conftest import LLAMA
from tests.learning.test_preference_tasks import BOUNDS as PREFERENCE_BOUNDS

PREFERENCES = sorted((ROOT / "configs/preferences").glob("*.yaml"))
PAGES = sorted(path for path in (ROOT / "docs/algorithms").glob("*.md") if path.name != "README.md")
OVERVIEW = (ROOT / "docs/algorithms/README.md").read_text()
# Parts of a step that only some algorithms use: greedy responses, squared probabilities, chosen tokens, a critic and
# resampling, replaced prompts, two rewards, no forward pass before the update.
FAST = ("remax", "optimal_token_baseline", "pf_ppo", "dapo")  # each needs another part of a step
LIKE_THEM = ("kl_cov", "gdpo", "bypass")


def tiny(path):
    """Return the configuration of a run with a small random actor, its tokenizer, and no engine process."""
    config = values(path)
    config["model"]["init_args"]["actor"] = {
        "class_path": "lightning_rlhf.FromConfig",
        "init_args": {"architecture": LLAMA},
    }
    config["data"]["init_args"]["tokenizer"] = {
        "class_path": "lightning_rlhf.data.tokenizers.CharacterTokenizer",
        "init_args": {"characters": "0123456789+=: "},
    }
    for loop in (c for c in config["trainer"]["callbacks"] if "RolloutLoop" in str(c)):
        loop["init_args"]["engine"] = "lightning_rlhf.rollout.transformers.TransformersEngine"
    return config


def contains(part, whole):
    """Return whether ``whole`` contains all keys and values of ``part``."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(part[key], whole[key]) for key in part)
    if isinstance(part, list) and any(isinstance(item, dict) for item in part):
        return isinstance(whole, list) and all(any(contains(item, other) for other in whole) for item in part)
    return part == whole


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("path", CONFIGS + PREFERENCES, ids=lambda path: path.stem)
def test_every_configuration_builds_its_objects(cli, path, monkeypatch):
    made = []
    monkeypatch.setattr(RLHFCLI, "shown_command", "export")
    monkeypatch.setattr(RLHFCLI, "_run_subcommand", lambda self, subcommand: made.append(self.model))
    result = cli("fit", *arguments(path))
    assert (result.code, result.err) == (0, "")
    (model,) = made
    inputs = values(path)["model"]["init_args"]
    for name in ("advantages", "policy_loss", "aggregation"):
        if "class_path" in inputs.get(name, {}):
            assert type(getattr(model, name)).__name__ == inputs[name]["class_path"].rpartition(".")[2]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("name", "objects"),
    [
        ("gspo", {"policy_loss": GSPOLoss(3e-4, 4e-4), "aggregation": SequenceMeanTokenMean()}),
        ("gdpo", {"advantages": GDPO(("accuracy", "overlong"), (1.0, 0.5))}),
        ("tis", {"correction": VerlCorrection.decoupled_token_is(2.0)}),
        ("bypass", {"correction": VerlCorrection.bypass_ppo_clip()}),
        ("dr_grpo", {"advantages": GRPO(normalize_std=False), "aggregation": SequenceMeanTokenSum(40)}),
        ("dapo", {"policy_loss": ClippedPolicyLoss(clip_range_low=0.2, clip_range_high=0.28)}),
        ("pf_ppo", {"resampling": ScoreResampling("max_random")}),
    ],
)
def test_configured_objects_have_the_documented_values(cli, name, objects, monkeypatch):
    made = []
    monkeypatch.setattr(RLHFCLI, "shown_command", "export")
    monkeypatch.setattr(RLHFCLI, "_run_subcommand", lambda self, subcommand: made.append(self.model))
    assert cli("fit", *arguments(BASE.with_stem(name))).code == 0
    assert {option: getattr(made[0], option) for option in objects} == objects


STEPS = [path for path in CONFIGS if path.stem in FAST] + PREFERENCES
STEPS += [pytest.param(path, marks=pytest.mark.slow) for path in CONFIGS if path.stem in LIKE_THEM]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_step_with_a_random_actor_passes_without_messages(fit, path):
    result = fit(tiny(path), "--trainer.fast_dev_run", "1")
    assert (result.code, result.err, result.warned) == (0, "", [])


def test_every_configuration_has_a_page_and_a_bound():
    names = {path.stem for path in CONFIGS}
    assert all(0.8 < bound < 1 for path in CONFIGS for bound in bounds(path))
    assert {path.stem for path in PREFERENCES} == set(PREFERENCE_BOUNDS)
    assert names | set(PREFERENCE_BOUNDS) | {"ppo"} == {path.stem for path in PAGES}
    for path in PAGES:
        assert f"]({path.name})" in OVERVIEW


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_agrees_with_the_configuration(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    (config,) = set(re.findall(r"\]\((?:\.\./)+(configs/\S+\.yaml)\)", text))
    inputs = values(ROOT / config)
    (snippet,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert contains(yaml.safe_load(snippet), inputs)
    touched = set(re.findall(r"\]\((?:\.\./)+((?:lightning_rlhf|tests|configs|callbacks)/[^)]+)\)", text))
    assert config in touched
    assert any(name.startswith("tests/") for name in touched)
    base = "--config configs/algorithms/base.yaml " if ROOT / config in CONFIGS else ""
    assert f"`lightning-rlhf fit {base}--config {config}`" in text


def test_tables_are_generated_from_the_configurations():
    for page, text in pages().items():
        assert page.read_text() == text, f"{page}: run python -m tests.algorithm_tables"


@pytest.mark.slow
def test_combined_example_of_the_overview_runs(fit):
    (snippet,) = re.findall(r"```yaml\n(.*?)```", OVERVIEW, re.DOTALL)
    config, inputs = tiny(BASE.with_stem("grpo")), yaml.safe_load(snippet)["model"]
    saved = ("actor", "update_epochs", "minibatch_size")
    options = {name: config["model"]["init_args"][name] for name in saved}
    config["model"] = {"class_path": inputs["class_path"], "init_args": inputs["init_args"] | options}
    result = fit(config, "--trainer.fast_dev_run", "1")
    assert (result.code, result.err, result.warned) == (0, "", [])


def test_disagreement_of_a_page_is_detected():
    whole = {"a": {"b": 1, "c": [{"d": 2, "e": 3}, 4], "f": [1, 2]}}
    assert contains({"a": {"c": [{"e": 3}]}}, whole)
    for wrong in ({"a": {"b": 2}}, {"a": {"g": 1}}, {"a": {"c": [{"d": 3}]}}, {"a": {"f": [1]}}, {"b": {"f": [1, 2]}}):
        assert not contains(wrong, whole)
