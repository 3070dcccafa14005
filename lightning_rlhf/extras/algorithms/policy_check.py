"""PolicyCheck: tests and scales a reward model on samples of the policy that it will train."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rlhf.data.rows import Source, text_of, use_rows
from lightning_rlhf.data.tokenizers import generation_ends
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.diagnostics import ordered_fraction
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.models.loading import ModelSource, as_source, save_architecture
from lightning_rlhf.models.lora import merged
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.ranges import check_at_least
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.assemble import scored_rollout
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import Prompt, PromptBatch, Rollout, SamplingParams

log = logging.getLogger(__name__)


class PolicyCheck(Callback):
    """Scores samples of a policy after a reward model is trained, and normalizes the reward model with them.

    You need it because a reward model can order every held-out pair correctly and still fail on the policy's responses.
    With a rule that recognises correct responses, ``val/policy_order`` is the fraction of (correct, incorrect) pairs of
    samples that the reward model orders correctly. The scores of the samples get mean 0 and standard deviation 1, so
    that reward and critic start on the same scale.

    Args:
        policy: policy that PPO will start from.
        prompts: rows with ``prompt`` and the columns of the rule.
        rule: reward function that is at least 1 for correct responses; None only normalizes.
        num_samples: number of prompts, one sample each, at least 2.
        max_response_tokens: longest response, at least 1.
        min_pair_accuracy: accuracy on held-out pairs below which the run warns.
        min_policy_order: accuracy on samples below which the run warns.
    """

    def __init__(
        self,
        policy: str | ModelSource,
        prompts: Source,
        rule: RewardFunction | None = None,
        num_samples: int = 256,
        max_response_tokens: int = 256,
        min_pair_accuracy: float = 0.95,
        min_policy_order: float = 0.98,
    ) -> None:
        check_at_least(2, num_samples=num_samples)
        check_at_least(1, max_response_tokens=max_response_tokens)
        self.policy = as_source(policy)
        self.prompts = prompts
        self.rule = rule
        self.num_samples = num_samples
        self.max_response_tokens = max_response_tokens
        self.min_pair_accuracy = min_pair_accuracy
        self.min_policy_order = min_policy_order
        self._rows: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: RewardModule, stage: str) -> None:
        """Validate prompts, rule and vocabularies before training."""
        rows, _ = use_rows(self.prompts, "policy check", dict, on_bad_row="error")
        if len(rows) < 2:
            raise UsageError(f"PolicyCheck needs at least 2 prompts, got {len(rows)}")
        self._rows = rows[: self.num_samples]
        if self.rule is not None:
            self.rule.check(sorted(name for name in rows[0] if name != "prompt"))
        roles = {"the reward model": pl_module.sources["reward_model"], "PolicyCheck's policy": self.policy}
        check_vocabularies(roles, trainer.datamodule.tokenizer)

    def on_train_end(self, trainer: Trainer, pl_module: RewardModule) -> None:
        """Sample, score, normalize, and log the metrics."""
        if trainer.fast_dev_run:
            return
        samples: Any = self._samples(trainer) if trainer.is_global_zero else None
        rollout: Rollout = trainer.strategy.broadcast(samples)  # only rank 0 samples and calls the rule
        scores = self._scores(pl_module, rollout.to(pl_module.device)).cpu()
        reward_model: Any = pl_module.reward_model
        reward_model.fit_normalization(scores.to(pl_module.device))
        metrics = {"val/policy_score_mean": scores.mean(), "val/policy_score_std": scores.std()}
        if self.rule is not None:
            correct = rollout.rewards[self.rule.label] >= 1
            metrics["val/policy_accuracy"] = correct.float().mean()
            metrics["val/policy_order"] = torch.tensor(ordered_fraction(scores[correct], scores[~correct]))
        trainer.callback_metrics.update(metrics)
        self._report({**trainer.callback_metrics, **metrics})

    def _samples(self, trainer: Trainer) -> Rollout:
        tokenizer = trainer.datamodule.tokenizer
        rows = self._rows
        texts = [text_of(row, "prompt") for row in rows]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        columns = [{name: row.get(name) for name in rows[0] if name != "prompt"} for row in rows]
        prompts = [Prompt(ids[i], texts[i], columns[i], index=i, position=i) for i in range(len(rows))]
        directory = Path(trainer.default_root_dir) / "policy_check"
        save_architecture(self.policy, directory)
        engine = TransformersEngine()
        longest = max(map(len, ids)) + self.max_response_tokens
        engine.start(EngineSetup(directory, self.policy.dtype or "float32", longest, directory / "engine.log"))
        policy = self.policy.causal()
        engine.update_weights(merged(policy.lm, whole_tensors(policy.lm)), version=0)
        ends = dict.fromkeys([tokenizer.eos_token_id, *generation_ends(getattr(self.policy, "path", None))])
        sampling = SamplingParams(self.max_response_tokens, stop_token_ids=tuple(ends))
        seeds = [derive_seed(run_seed(), "policy check", i) for i in range(len(rows))]
        completions = generate(engine, ids, sampling, seeds)
        return scored_rollout(PromptBatch(prompts), completions, [self.rule] if self.rule else [], tokenizer)

    @torch.no_grad()
    def _scores(self, module: RewardModule, rollout: Rollout) -> Tensor:
        scores = torch.zeros(len(rollout), device=rollout.reward.device)
        reward_model = module.role_strategy.role("reward_model")
        for rows, _ in module.micro_batches.split(rollout):
            part = rollout[rows]
            ends = (part.total_lengths - 1).unsqueeze(1)
            input_ids, _, packing = module.layout.lay_out(part)
            with module.trainer.precision_plugin.forward_context():
                outputs = reward_model(input_ids, ends, packing)
            scores[rows.to(scores.device)] = outputs.squeeze(1)
        return scores

    @property
    def health_bounds(self) -> dict[str, float]:
        """Lowest accuracies without a warning, by metric."""
        return {"val/pair_accuracy": self.min_pair_accuracy, "val/policy_order": self.min_policy_order}

    def _report(self, metrics: dict[str, Tensor]) -> None:
        for name, bound in self.health_bounds.items():
            if name not in metrics:
                continue
            value = float(metrics[name])
            log.info("%s = %.3f (recommended: at least %.2f)", name, value, bound)
            if not value >= bound:
                log.warning(
                    "%s is %.3f, below %.2f: PPO may learn to exploit this reward model instead of the task. "
                    "Train it longer, or on pairs that are closer to the policy's responses.",
                    *(name, value, bound),
                )
