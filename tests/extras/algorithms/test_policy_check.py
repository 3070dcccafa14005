"""PolicyCheck: the reward model is tested and normalized on samples of the policy."""

import logging
from functools import partial

import pytest
import torch

from lightning_rlhf import PreferenceDataModule, RewardModule
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.callbacks import HealthChecks, MetricsCSV, PolicyCheck
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.report.run_directory import RunDirectory
from lightning_rlhf.functional.diagnostics import ordered_fraction
from lightning_rlhf.rewards.function import RewardFunction
from tests.helpers import assert_close
from tests.stand_ins import TINY_LLAMA, TinyModel, quiet_trainer

PAIRS = InMemory([{"prompt": "a", "chosen": "bb", "rejected": "cc"}] * 4)
PROMPTS = InMemory([{"prompt": letter * size, "letter": letter} for letter in "abcd" for size in range(1, 5)])


def begins_late(completions, letter):
    """Return 1 for a text that begins with d or a later letter; ``letter`` makes its column required."""
    return [float(text[:1] > "c") for text in completions]


class RecordingCheck(PolicyCheck):
    """Records the rollout that it sampled and the scores before normalization."""

    def _scores(self, module, rollout):
        self.rollout, self.raw = rollout, super()._scores(module, rollout)
        return self.raw


@pytest.fixture
def checked(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)

    def checked(precision="32-true", callbacks=(), **arguments):
        defaults = {"policy": TinyModel(seed=1), "prompts": PROMPTS, "rule": RewardFunction(begins_late)}
        check = RecordingCheck(**{**defaults, "max_response_tokens": 6, **arguments})
        data = PreferenceDataModule(PAIRS, CharacterTokenizer("abcdefg"), val=PAIRS, batch_size=2)
        module = RewardModule(TinyModel(), optimizer=partial(torch.optim.SGD, lr=0.1))
        trainer = quiet_trainer(callbacks=[check, *callbacks], default_root_dir=tmp_path, precision=precision)
        trainer.fit(module, datamodule=data)
        return check, module, {name: float(value) for name, value in trainer.callback_metrics.items()}

    return checked


def test_share_of_correctly_ordered_samples_is_over_all_pairs(checked):
    check, _, metrics = checked()
    right = torch.tensor(begins_late(texts_of(check.rollout), None)) >= 1
    assert 0 < right.sum() < len(right) == 16
    assert metrics["val/policy_accuracy"] == pytest.approx(right.float().mean().item())
    assert metrics["val/policy_order"] == pytest.approx(ordered_fraction(check.raw[right], check.raw[~right]))


def test_report_has_the_metrics_and_limits_of_the_check(checked, tmp_path):
    callbacks = [MetricsCSV(), HealthChecks()]
    _, module, metrics = checked(callbacks=callbacks, min_policy_order=1.01, min_pair_accuracy=0.0)
    run = RunDirectory(tmp_path)
    step, last = run.rows()[-1]
    assert step == module.trainer.global_step
    names = {"val/policy_accuracy", "val/policy_order", "val/policy_score_mean", "val/policy_score_std"}
    assert {name: last[name] for name in names} == {name: metrics[name] for name in names}
    assert "val/loss" in last  # the row of the last validation
    (finding,) = run.findings()
    assert (finding.check, finding.metric, finding.bound) == ("reward model", "val/policy_order", 1.01)


def texts_of(rollout):
    tokenizer = CharacterTokenizer("abcdefg").load()
    rows = zip(rollout.response_ids, rollout.response_lengths, strict=True)
    return tokenizer.batch_decode([ids[:length] for ids, length in rows], skip_special_tokens=True)


def test_scores_equal_those_of_whole_texts_scored_one_by_one(checked):
    check, module, _ = checked()
    model, rollout = module.reward_model, check.rollout
    for i in range(len(rollout)):
        prompt = rollout.prompt_ids[i, : rollout.prompt_lengths[i]]
        ids = torch.cat([prompt, rollout.response_ids[i, : rollout.response_lengths[i]]])
        with torch.no_grad():
            raw = model.lm(ids[None], use_cache=False).logits.item()
        assert check.raw[i].item() == pytest.approx(raw, abs=1e-5)


def test_scores_are_computed_in_the_training_precision_of_the_model(checked):
    """Scores of a bf16-mixed run equal those under autocast, before they are normalized, and differ from float32's."""
    check, module, _ = checked(precision="bf16-mixed")
    ((rows, _),) = module.micro_batches.split(check.rollout)
    rollout = check.rollout[rows]
    ids, ends = join(rollout)[0], (rollout.total_lengths - 1).unsqueeze(1)
    model = module.reward_model
    packing = module.layout.pack(rollout, ids.shape[1])

    @torch.no_grad()
    def without_normalization():
        return (model(ids, ends, packing) * model.score_std + model.score_mean).squeeze(1)

    with torch.autocast("cpu", torch.bfloat16):
        mixed = without_normalization()
    assert_close(check.raw[rows], mixed)
    assert (check.raw[rows] - without_normalization()).abs().max() > 1e-3


def test_normalized_scores_have_mean_0_and_deviation_1(checked):
    check, module, metrics = checked()
    again = PolicyCheck._scores(check, module, check.rollout)  # not of RecordingCheck, so that raw stays
    assert again.mean().item() == pytest.approx(0, abs=1e-5)
    assert again.std().item() == pytest.approx(1, abs=1e-5)
    assert metrics["val/policy_score_mean"] == pytest.approx(check.raw.mean().item(), abs=1e-6)
    assert metrics["val/policy_score_std"] == pytest.approx(check.raw.std().item(), abs=1e-6)


def test_reward_model_below_the_limits_is_warned_about(checked, caplog):
    caplog.set_level("INFO", "lightning_rlhf")
    checked(min_policy_order=1.01, min_pair_accuracy=0.0)
    output = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(output) == 1
    assert output[0].startswith("val/policy_order is ")
    assert "below 1.01: PPO may learn to exploit this reward model" in output[0]
    caplog.clear()
    checked(min_policy_order=0.0, min_pair_accuracy=0.0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_check_without_a_rule_only_sets_the_scale(checked):
    _, module, metrics = checked(rule=None)
    assert "val/policy_order" not in metrics
    assert "val/policy_score_std" in metrics
    assert module.reward_model.score_std.item() != 1.0


def test_samples_are_the_same_in_every_run(checked):
    first, second = checked()[0].rollout, checked()[0].rollout
    assert torch.equal(first.response_ids, second.response_ids)
    assert checked(num_samples=5)[0].rollout.response_ids.shape[0] == 5


def test_policy_with_another_tokenizer_raises_before_training(checked, tmp_path):
    TinyModel().causal().save_pretrained(tmp_path / "policy")
    CharacterTokenizer("gfedcba").load().save_pretrained(tmp_path / "policy")
    message = (
        "PolicyCheck's policy was trained with another tokenizer: in its tokenizer 'a' is 10, in the run's 'a' is 4"
    )
    with pytest.raises(ValueError, match=message):
        checked(policy=str(tmp_path / "policy"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"policy": TinyModel(TINY_LLAMA | {"vocab_size": 9})},
            "the tokenizer has 11 tokens, PolicyCheck's policy only 9",
        ),
        (
            {"policy": TinyModel(TINY_LLAMA | {"vocab_size": 12})},
            r"vocabulary sizes differ \(PolicyCheck's policy 12, the reward model 11\), and there is no tokenizer to",
        ),
        ({"policy": "runs/nowhere/at/all"}, "no model at 'runs/nowhere/at/all'"),
        ({"prompts": InMemory([{"prompt": "a", "letter": "a"}])}, "PolicyCheck needs at least 2 prompts, got 1"),
        ({"prompts": InMemory([{"prompt": "a"}] * 3)}, "reward function 'begins_late' needs 'letter'"),
        ({"num_samples": 1}, "num_samples must be at least 2"),
    ],
    ids=["small vocabulary", "large vocabulary", "path", "prompts", "column", "samples"],
)
def test_invalid_prompts_and_rules_raise_before_training(checked, arguments, message, monkeypatch):
    monkeypatch.setattr(RewardModule, "training_step", lambda *args: pytest.fail("it trained"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        checked(**arguments)
