"""Warnings of health checks during a run."""

import json

import pytest
from lightning.pytorch import Callback

from lightning_rlhf.callbacks import HealthChecks, MetricsCSV
from lightning_rlhf.extras.algorithms.sequence_policy_losses import GSPOLoss
from lightning_rlhf.extras.health.callback import skipped_checks
from lightning_rlhf.extras.health.monitor import HealthMonitor
from lightning_rlhf.extras.report.run_directory import RunDirectory
from lightning_rlhf.rewards.function import RewardFunction


def none_right(completions, answer):
    return [0.7 * (text == 7) + 0.1 for text in completions]  # a text never equals a number


def differs_in_last_step(completions, trainer_state):
    return [float(number > 0 and trainer_state.global_step == 2) for number in range(len(completions))]


def half_of_them(completions):
    return [float(number % 2) for number in range(len(completions))]


def of_nothing(completions):
    return [None for _ in completions]


def test_constant_reward_in_the_first_steps_warns_once(run, caplog):
    rewards = [
        RewardFunction(none_right),
        RewardFunction(none_right, name="only_logged", weight=0.0),
        RewardFunction(differs_in_last_step),
        RewardFunction(half_of_them),
        RewardFunction(of_nothing, dry_call=False),
    ]
    run(loop={"rewards": rewards}, trainer={"max_epochs": 3}, callbacks=[HealthChecks()]).fit()
    messages = [record.message for record in caplog.records if "for all responses of" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(
        "step 3: reward none_right was 0.1 for all responses of 3 steps: the policy learns nothing"
    )
    assert messages[0].endswith("the responses, which RolloutLog writes to rollouts/")


class FarFromReference(Callback):
    """Replaces the KL of each step, before :class:`HealthChecks` reads it."""

    def __init__(self, *values):
        self.values = values

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        tokens = trainer.callback_metrics["rollout/response_tokens_mean"]
        pl_module.log("kl/ref", self.values[trainer.global_step - 1] * float(tokens))


def test_kl_above_the_limit_warns_once_with_value_limit_and_remedy(run, caplog):
    callbacks = [FarFromReference(0.09, 0.25, 0.5), HealthChecks()]
    loop = {"rewards": [RewardFunction(none_right)]}
    run(loop=loop, trainer={"max_epochs": 2, "max_steps": 3}, callbacks=callbacks).fit()
    (warned,) = [record.message for record in caplog.records if "kl/ref" in record.message]
    assert warned.startswith("step 2: kl/ref is ")
    assert "0.25 per token, above 0.1, and the reward has not risen: " in warned
    assert warned.endswith("optimizer.init_args.lr) or raise the coef of kl_loss or kl_reward")


@pytest.mark.slow
def test_resumed_run_warns_like_an_uninterrupted_run(run, caplog, tmp_path):
    """A warning of steps before the checkpoint is not repeated; the first steps are those of the whole run."""
    rewards = [RewardFunction(none_right)]

    def callbacks():
        return [FarFromReference(0.25, 0.5, 0.5), MetricsCSV(), HealthChecks()]

    def warned():
        result = [
            record.message for record in caplog.records if "kl/ref" in record.message or "none_right" in record.message
        ]
        caplog.clear()
        return result

    run(loop={"rewards": rewards}, trainer={"max_epochs": 2, "max_steps": 3}, callbacks=callbacks()).fit()
    whole = warned()
    assert [message.split(":")[0] for message in whole] == ["step 1", "step 3"]
    first = run(loop={"rewards": rewards}, trainer={"max_epochs": 2, "max_steps": 2}, callbacks=callbacks())
    first.fit()
    first.trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert warned() == whole[:1]
    rest = run(loop={"rewards": rewards}, trainer={"max_epochs": 2, "max_steps": 3}, callbacks=callbacks())
    rest.fit(ckpt_path=tmp_path / "x.ckpt")
    assert warned() == whole[1:]


def test_report_has_the_checks_of_the_run(run, tmp_path, caplog):
    """A reward that is only logged and a check that the callback skips do not appear in the report."""
    rewards = [RewardFunction(half_of_them), RewardFunction(none_right, name="only_logged", weight=0.0)]
    callbacks = [FarFromReference(0.25, 0.5, 0.5, 0.5), MetricsCSV(), HealthChecks()]
    made = run(loop={"rewards": rewards}, trainer={"max_epochs": 4, "max_steps": 4}, callbacks=callbacks)
    made.module.policy_loss = GSPOLoss()
    made.fit()
    assert RunDirectory(tmp_path).findings() == callbacks[-1].monitor.findings
    assert json.loads((tmp_path / "health_settings.json").read_text()) == {
        "rewards": ["half_of_them"],
        "skipped": ["clipping"],
        "bounds": {},
        "weights": {"half_of_them": 1.0, "only_logged": 0.0},
    }
    (tmp_path / "health_settings.json").unlink()
    assert "constant reward" in [finding.check for finding in RunDirectory(tmp_path).findings()]


def test_steps_after_the_checkpoint_are_not_counted_twice(run, tmp_path):
    """The table has rows after the checkpoint of a killed run; the resumed run repeats these steps."""

    def start(steps, *callbacks):
        return run(trainer={"max_epochs": 4, "max_steps": steps}, callbacks=[*callbacks, MetricsCSV()])

    first = start(1)
    first.fit()
    first.trainer.save_checkpoint(tmp_path / "x.ckpt")
    start(3).fit()
    checks = HealthChecks()
    start(2, checks).fit(ckpt_path=tmp_path / "x.ckpt")
    assert [row["step"] for row in checks.monitor._history.recent] == [1, 2]


def test_checks_that_do_not_apply_are_skipped(run):
    plain = run(callbacks=[HealthChecks()], trainer={"max_steps": 1})
    assert not skipped_checks(plain.module, [plain.loop])
    other = run(model={"policy_loss": GSPOLoss()}, loop={"max_staleness": 1})
    assert skipped_checks(other.module, [other.loop]) == ["clipping", "engine and actor"]
    monitor = HealthMonitor(skipped=["clipping"])
    for step in range(1, 9):
        assert not monitor.add(step, {"policy/clip_fraction": 0.9})
