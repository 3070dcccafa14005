"""Health checks: signs, in the metrics of a run, that it does not learn as it should."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from lightning_rlhf.callbacks.records.run_history import FIRST_STEPS, Row, RunHistory, is_validation, values_of
from lightning_rlhf.extras.health.hacking import one_form, rewarded_form, second_reward
from lightning_rlhf.extras.health.history import Failure, HealthHistory

# Nats per response token. The quickstart, whose policy changes much, stays below 0.08; answers of few words in another
# form than the model's own can cost more than one each while it learns well.
MAX_KL_PER_TOKEN = 0.1
_NEARLY_LARGEST = 0.9  # part of the largest reward that is nothing to improve on
_MAX_KL_PER_TOKEN_OF_RISING_SCORE = 0.3  # without reward functions, while the score of a reward model has risen


@dataclass(frozen=True)
class Finding:
    """A health check that failed.

    Args:
        check: name of the check.
        step: first step at which it failed.
        metric: metric that it compares.
        value: value of the metric, or a value that the check derives from it.
        bound: bound that the value exceeds, or falls below.
        message: sentence with the numbers.
        remedy: sentence with the next action.
    """

    check: str
    step: int
    metric: str
    value: float
    bound: float
    message: str
    remedy: str


@dataclass
class HealthMonitor:
    """Runs the health checks on each row of metrics, and reports each check once.

    Args:
        rewards: names of the reward functions whose weight is not 0.
        skipped: names of checks that do not apply to the run.
        bounds: lowest accuracies of a reward model before PPO uses it, by metric.
        weights: weight of each reward by name, those with weight 0 included.
        findings: failed checks so far.
    """

    rewards: Sequence[str] = ()
    skipped: Collection[str] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._history = HealthHistory(self.rewards, self.bounds, weights=self.weights)

    def add(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Return the checks that fail for the first time.

        Args:
            step: number of the step, starting at 1.
            metrics: metrics of a training step, or of a validation, some of whose names begin with ``val/``.
        """
        history = self._history
        row = {**metrics, "step": float(step)}
        if any(is_validation(name) for name in metrics):
            history.validations.append(row)
        else:
            history.add(row)
        new: list[Finding] = []
        for name, check in CHECKS.items():
            failed = {finding.check: finding.step for finding in [*self.findings, *new]}
            if name in failed or name in self.skipped:
                continue
            if (failure := check(history)) is not None:
                finding = Finding(name, step, *failure)
                cause = next((cause for cause in _CAUSES.get(name, ()) if cause in failed), None)
                came_first = name == "truncation" and _failed_from_the_start(history, finding)
                if cause is not None and not came_first:
                    remedy = f'This is probably a consequence of "{cause}" (step {failed[cause]}): mend that first'
                    finding = replace(finding, remedy=remedy)
                new.append(finding)
        self.findings += new
        return new


def _constant_reward(history: RunHistory) -> Failure | None:
    if len(history.first) < FIRST_STEPS or len(history.recent) > FIRST_STEPS:
        return None
    for name in history.rewards:
        if values_of(history.first, f"reward_{name}/not_applicable") == [1.0] * FIRST_STEPS:
            return (
                f"reward_{name}/not_applicable",
                1.0,
                1.0,
                f"reward {name} was None for all responses of {FIRST_STEPS} steps: the policy learns nothing from it",
                "Return a number for each response that the reward judges, and None only where it does not apply",
            )
        means = values_of(history.first, f"reward/{name}")
        deviations = values_of(history.first, f"reward/{name}_std")
        constant = len(deviations) == len(means) == FIRST_STEPS and len({f"{mean:.6g}" for mean in means}) == 1
        if constant and all(deviation <= 1e-6 * abs(mean) for deviation, mean in zip(deviations, means, strict=True)):
            return (
                f"reward/{name}_std",
                deviations[-1],
                0.0,
                f"reward {name} was {means[0]:.6g} for all responses of {FIRST_STEPS} steps: the policy learns "
                "nothing from it",
                "If it should differ, check the values that it compares (the number 7 is not the text '7'), and the "
                "responses, which RolloutLog writes to rollouts/",
            )
    return None


def _lost_reward(history: RunHistory) -> Failure | None:
    means, deviations = history.last("reward/mean", 4), history.last("reward/std", 4)
    earlier = [row for row in [*history.first, *history.recent] if "reward/mean" in row][:-4]
    if not means or not deviations or not values_of(earlier, "reward/mean"):
        return None
    best_row = max(earlier, key=lambda row: row["reward/mean"])
    best, last = best_row["reward/mean"], means[-1]
    constant = max(deviations) <= 1e-6 * abs(best) and max(means) - min(means) <= 1e-6 * abs(best)
    if not constant or not last < best - 2 * _standard_error(best_row):  # else the best step may have been luck
        return None
    return (
        "reward/mean",
        last,
        best,
        f"reward/mean fell from {best:.3g} to {last:.3g}, the same for all responses of 4 steps: an update has damaged "
        "the policy",
        "Read the responses. Start again from a checkpoint before the fall, or from the first model, with a learning "
        "rate (model.init_args.optimizer.init_args.lr) of a tenth",
    )


def _equal_groups(history: RunHistory) -> Failure | None:
    share, reward = (history.mean(name, 5) for name in ("group/equal_reward_fraction", "reward/mean"))
    if not share > 0.9 or math.isnan(reward):
        return None
    if history.has_risen(reward):
        return _equal_but_wrong(history, share, reward)
    if _lost_reward(history):
        return None
    return (
        "group/equal_reward_fraction",
        share,
        0.9,
        f"all responses to a prompt have the same reward for {share:.0%} of the prompts in 5 steps (above 90 %): these "
        "prompts teach nothing",
        "Use prompts of another difficulty, a larger group_size, a reward with more values, or dynamic_sampling",
    )


def _equal_but_wrong(history: RunHistory, share: float, reward: float) -> Failure | None:
    """Return a failure if groups are equal although some of them have less than the largest reward."""
    largest = history.mean("reward/max", 5)
    if not largest > 0 or reward > _NEARLY_LARGEST * largest:
        return None
    return (
        "group/equal_reward_fraction",
        share,
        0.9,
        f"all responses to a prompt have the same reward for {share:.0%} of the prompts in 5 steps (above 90 %), and "
        f"the mean reward is {reward:.3g} of at most {largest:.3g}: the policy repeats its answers, right and wrong "
        "ones, and further steps change little",
        "Start again from the model, or from an earlier checkpoint (keep_last of RunCheckpoint), with half the "
        "learning rate; then also with kl_loss: {coef: 0.001}, then with ent_coef: 0.001; or use other prompts",
    )


def _kl(history: RunHistory) -> Failure | None:
    kl, tokens = (history.mean(name, 1) for name in ("kl/ref", "rollout/response_tokens_mean"))
    has_risen = history.has_risen(history.mean("reward/mean", min(3, len(history.recent))))
    if has_risen and history.rewards:  # validations show whether the reward is exploited
        return None
    bound = _MAX_KL_PER_TOKEN_OF_RISING_SCORE if has_risen else MAX_KL_PER_TOKEN
    if not kl > bound * tokens:
        return None
    per_token = kl / tokens
    reward = "" if has_risen else ", and the reward has not risen"
    return (
        "kl/ref",
        per_token,
        bound,
        f"kl/ref is {kl:.3g} nats per response, {per_token:.3g} per token, above {bound:g}{reward}: the policy moves "
        "away from the reference, and responses often become worse",
        "Lower the learning rate (model.init_args.optimizer.init_args.lr) or raise the coef of kl_loss or kl_reward",
    )


def _entropy(history: RunHistory) -> Failure | None:
    entropies, rewards = history.last("policy/entropy", 20), history.last("reward/mean", 20)
    start = history.at_start("policy/entropy")
    if not entropies or not rewards or not fmean(entropies[-5:]) < 0.1 * start:
        return None
    spread = fmean(history.last("reward/std", 5) or [0.0])
    if (
        history.has_risen(fmean(rewards[10:]))
        or fmean(rewards[10:]) > fmean(rewards[:10]) + 0.02 * spread
        or spread == 0
    ):
        return None
    entropy = fmean(entropies[-5:])
    return (
        "policy/entropy",
        entropy,
        0.1 * start,
        f"policy/entropy fell from {start:.3g} to {entropy:.3g} nats (below a tenth), and the reward has not risen for "
        "10 steps: the policy repeats itself and finds nothing better",
        "Lower the learning rate, or set ent_coef, a larger clip_high or a higher temperature",
    )


def _length(history: RunHistory) -> Failure | None:
    start, length = history.at_start("rollout/response_tokens_mean"), history.mean("rollout/response_tokens_mean", 5)
    is_shorter = length < start / 3 and not history.has_risen(history.mean("reward/mean", 5))  # shorter may be right
    if not start > 0 or not (is_shorter or length > 3 * start):
        return None
    return (
        "rollout/response_tokens_mean",
        length,
        3 * start if length > start else start / 3,
        f"responses have {length:.0f} tokens, at the start {start:.0f}: their length has changed by more than a factor "
        "of 3",
        "Read responses of both steps. If the reward can be raised by length alone, add an overlong penalty or change "
        "the reward",
    )


def _truncation(history: RunHistory) -> Failure | None:
    share = history.mean("rollout/truncated_fraction", 3)
    if not share > 0.2:
        return None
    has_turns = history.last("env/turns", 1)
    limits = "max_response_tokens"
    if has_turns:
        limits = "max_turn_tokens of the environment, or max_response_tokens"
    return (
        "rollout/truncated_fraction",
        share,
        0.2,
        f"{share:.0%} of the responses of 3 steps were cut at the length limit (above 20 %)",
        f"Raise {limits}. If responses do not end, check that the model was trained to end with the "
        "tokenizer's end token (eos_token), or set stop_token_ids",
    )


def _clipping(history: RunHistory) -> Failure | None:
    share = history.mean("policy/clip_fraction", 3)
    if not share > 0.3:
        return None
    return (
        "policy/clip_fraction",
        share,
        0.3,
        f"the ratio of {share:.0%} of the tokens was clipped in 3 steps (above 30 %): updates are too large",
        "Lower the learning rate or update_epochs, or raise minibatch_size",
    )


def _engine(history: RunHistory) -> Failure | None:
    difference = history.mean("rollout/logprob_diff_mean", 3)
    if not difference > 0.1:
        return None
    return (
        "rollout/logprob_diff_mean",
        difference,
        0.1,
        f"log-probabilities of engine and actor differ by {difference:.2g} nats per token in 3 steps (above 0.1): the "
        "engine samples from another policy than the one that learns",
        "Set the same dtype for both, or a correction (correction: RolloutCorrection)",
    )


def _critic(history: RunHistory) -> Failure | None:
    explained = history.mean("value/explained_variance", 5)
    if not history.last("value/explained_variance", 20) or not explained < -0.1:
        return None
    if history.mean("reward/std", 5) < history.at_start("reward/std") / 2:  # nearly equal returns cannot be explained
        return None
    return (
        "value/explained_variance",
        explained,
        -0.1,
        f"value/explained_variance is {explained:.2g} after 20 steps (below -0.1): the critic predicts returns worse "
        "than their mean does",
        "Raise the critic's learning rate, start it from the reward model, or train it alone first "
        "(critic_warmup_steps)",
    )


def _quality(history: RunHistory) -> str | None:
    """Return the name of the metric of validations that measures the policy; None without one."""
    names = ["val/fraction_correct_sampled", "val/fraction_correct_greedy", "val/score_sampled"]
    names += [f"val/{reward}_sampled" for reward in history.rewards] if len(history.rewards) == 1 else []
    return next((name for name in names if _has(history, name)), None)


def _worse_validation(history: RunHistory) -> Failure | None:
    name = _quality(history)
    if name is None or not _has(history, f"{name}_low") or not _has(history, f"{name}_high"):
        return None
    best, last = max(history.validations, key=lambda row: row[name]), history.validations[-1]
    if not last[f"{name}_high"] < best[f"{name}_low"]:
        return None
    return (
        name,
        last[name],
        best[f"{name}_low"],
        f"{name} is {last[name]:.3g} (95 % interval {last[f'{name}_low']:.3g} to {last[f'{name}_high']:.3g}), and was "
        f"{best[name]:.3g} ({best[f'{name}_low']:.3g} to {best[f'{name}_high']:.3g}) at step {best['step']:.0f}: "
        "training makes the policy worse",
        "Use the checkpoint of the best validation (keep_last or best of RunCheckpoint), and start again with half "
        "the learning rate (model.init_args.optimizer.init_args.lr), or mend the reward if it rose in training",
    )


def _over_optimisation(history: RunHistory) -> Failure | None:
    name = _quality(history)
    if name is None:
        return None
    values = values_of(history.validations, name)
    best = max(range(len(values)), key=values.__getitem__)
    later = [float(row["step"]) for row in history.validations[best + 1 :]]
    bound = values[best] - 0.05 * max(abs(values[best]), 0.2)
    rewards = values_of(list(history.recent), "reward/mean")
    if len(later) < 2 or not max(values[-2:]) < bound or len(rewards) < 10:
        return None
    if not history.validations[-1].get(f"{name}_high", -math.inf) < values[best]:  # the difference may be chance
        return None
    half = len(rewards) // 2
    if not fmean(rewards[half:]) > fmean(rewards[:half]):
        return None
    return (
        name,
        values[-1],
        bound,
        f"{name} fell from {values[best]:.3g} at step {history.validations[best]['step']:.0f} to {values[-1]:.3g}, "
        "while the training reward rises: the policy may exploit the reward",
        "Use the checkpoint of the best validation (best of RunCheckpoint), raise the coef of kl_loss or kl_reward, or "
        "mend the reward",
    )


def _reward_model(history: RunHistory) -> Failure | None:
    last = history.validations[-1] if history.validations else {}
    low = [name for name, bound in history.bounds.items() if last.get(name, bound) < bound]
    if math.isnan(last.get("val/policy_score_mean", math.nan)) or not low:  # a validation before the end of training
        return None
    name, bound = low[-1], history.bounds[low[-1]]
    return (
        name,
        last[name],
        bound,
        f"{name} is {last[name]:.3g} at the end (below {bound:g}): PPO may learn to exploit this reward model instead "
        "of the task",
        "Train it longer, or on pairs that are closer to the policy's responses",
    )


def _loss(history: RunHistory) -> Failure | None:
    start, loss = history.at_start("train/loss"), history.mean("train/loss", 10)
    if not start > 0 or not loss > 1.5 * start:
        return None
    return (
        "train/loss",
        loss,
        1.5 * start,
        f"train/loss rose from {start:.3g} to {loss:.3g}, the mean of 10 steps (above 1.5 times its start)",
        "Lower the learning rate, or begin with a warm-up",
    )


def _gradient(history: RunHistory) -> Failure | None:
    for name in ("grad_norm/actor", "grad_norm/critic"):  # that of a reward model without errors is nearly 0
        norms = history.last(name, 20)
        usual = median(norms) if norms else 0.0
        spikes = [norm for norm in norms if norm > 10 * usual > 0]
        if len(spikes) >= 3:
            return (
                name,
                max(spikes),
                10 * usual,
                f"{name} was more than 10 times its median {usual:.3g} in {len(spikes)} of 20 steps, up to "
                f"{max(spikes):.3g}",
                "Lower the learning rate or max_grad_norm, and look for extreme rewards or broken rows in these steps",
            )
    return None


def _waiting(history: RunHistory) -> Failure | None:
    parts = ("time/sync_s", "time/reward_s", "time/check_s")
    steps = history.last("time/step_s", 5)
    if not steps:
        return None
    waits = {name: sum(history.last(name, 5)) for name in parts}
    name = max(waits, key=lambda part: waits[part])
    share = sum(waits.values()) / sum(steps)
    if not share > 0.3:
        return None
    remedy = {
        "time/sync_s": "Push less often with larger steps, or use LoRA",
        "time/reward_s": "Compute rewards in more processes, or score responses as they finish (streaming)",
        "time/check_s": "Set check_rows of RolloutLoop lower",
    }
    return (
        name,
        share,
        0.3,
        f"{share:.0%} of 5 steps was neither generation nor learning (above 30 %), most of it {name}",
        remedy[name],
    )


CHECKS: dict[str, Callable[[HealthHistory], Failure | None]] = {
    "constant reward": _constant_reward,
    "lost reward": _lost_reward,
    "equal groups": _equal_groups,
    "KL to the reference": _kl,
    "entropy collapse": _entropy,
    "length drift": _length,
    "truncation": _truncation,
    "clipping": _clipping,
    "engine and actor": _engine,
    "critic": _critic,
    "over-optimisation": _over_optimisation,
    "worse validation": _worse_validation,
    "second reward": second_reward,
    "rewarded form": rewarded_form,
    "one form": one_form,
    "reward model": _reward_model,
    "rising loss": _loss,
    "gradient spike": _gradient,
    "waiting": _waiting,
}


def _failed_from_the_start(history: RunHistory, finding: Finding) -> bool:
    """Return whether a metric exceeded its bound in the first step, before anything could have caused that."""
    if history.first:
        return history.first[0].get(finding.metric, 0.0) > finding.bound
    return False


# Checks that often fail as a consequence of others.
_CAUSES = {
    "equal groups": ("constant reward", "lost reward", "KL to the reference"),
    "entropy collapse": ("lost reward", "KL to the reference"),
    "length drift": ("lost reward", "KL to the reference"),
    "truncation": ("lost reward", "KL to the reference"),
    "worse validation": ("lost reward", "KL to the reference", "over-optimisation"),
}


def _standard_error(row: Row) -> float:
    """Return the standard error of the mean reward of a step; 0 if the number of its responses is unknown."""
    tokens, mean = (row.get(name, math.nan) for name in ("rollout/response_tokens", "rollout/response_tokens_mean"))
    if tokens > 0 and mean > 0:
        error = row.get("reward/std", math.nan) / math.sqrt(tokens / mean)
    else:
        error = math.nan
    return 0.0 if math.isnan(error) else error


def _has(history: RunHistory, metric: str) -> bool:
    return bool(history.validations) and bool(values_of(history.validations, metric))
