"""Record the results of verl and TRL for aggregation, KL and rollout correction. README.md has the command."""

import datetime
import importlib.metadata
import re
from collections import defaultdict
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from make_golden import write
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper

SHAPE = (5, 7)
SEED = 20261122
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
# Recorded beside the presets, to bind every statistic, level and bound.
FURTHER = {
    "token_icepop_narrow": {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"},
    "sequence_icepop": {"rollout_is": "sequence", "rollout_is_threshold": "0.7_3.0"},
    "token_normalized": {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    "sequence_normalized": {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    # verl's k1 is that of rollout / train: reciprocal bounds hide it, those of the second do not.
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
    "token_k1_inverted": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_4.0"},
    "token_k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
    "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.1},
    "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
    "seq_sum_k2": {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 0.5},
    "seq_sum_k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.5},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1},
    "seq_mean_k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.1},
    "seq_mean_k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1},
    "seq_max_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.3},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.3},
    "two_at_once": {"rollout_rs": "token_k1,seq_sum_k3", "rollout_rs_threshold": "0.5_2.0,0.5"},
}


def make_inputs() -> dict[str, Tensor]:
    """Return random numbers of three decimals, which the file stores exactly."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(scale: float) -> Tensor:
        return (torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale).round(decimals=3)

    rollout_logprobs = -normal(1.5).abs()
    # The last response is hardly off, so that some rejections keep it; ratios of the others lie between 0.3 and 3.
    spread = torch.tensor([[0.4], [0.6], [0.3], [0.9], [0.0005]], dtype=torch.float64)
    old_logprobs = (rollout_logprobs + normal(1.0) * spread).round(decimals=4)
    logprobs = (old_logprobs + normal(0.5)).round(decimals=3)
    return {
        # A full row, a short one, one with two holes (tokens of an environment), one of a single token.
        "mask": torch.tensor(
            [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0], [1] * 7],
            dtype=torch.float64,
        ),
        "rollout_logprobs": rollout_logprobs,
        "old_logprobs": old_logprobs,
        "logprobs": logprobs,
        # Up to 3.5 away: verl's clamp of k3 to [-10, 10] binds for some.
        "ref_logprobs": (logprobs + normal(1.4).clamp(-3.5, 3.5)).round(decimals=3),
        "losses": normal(1.0),
    }


def record_aggregation(inputs: dict[str, Tensor], mode: str) -> dict[str, Any]:
    """Return loss and gradient, also with one empty response."""
    records = {}
    for name in ("full", "one_empty"):
        mask = inputs["mask"].clone()
        if name == "one_empty":
            mask[1] = 0
        losses = inputs["losses"].clone().requires_grad_()
        loss = core_algos.agg_loss(losses, mask, mode, loss_scale_factor=20)
        records[name] = {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, losses)[0]}
    return records


def record_kl(inputs: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return verl's estimates, k3 clamped to [-10, 10], and the gradient of their sum."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    estimate = core_algos.kl_penalty(logprobs, inputs["ref_logprobs"], kind)
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    return {"estimate": estimate.detach(), "gradient": gradient}


def record_importance(inputs: dict[str, Tensor], corrected: bool) -> dict[str, Any]:
    """Return TRL's loss with only the KL term: advantage 0, beta 1, mean over tokens."""
    logprobs = inputs["logprobs"].clone().requires_grad_()

    def alone(value: Tensor, **kwargs: str) -> Tensor:
        return value

    metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros(SHAPE), None),
        args=SimpleNamespace(use_bias_correction_kl=corrected, delta=None),
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(gather=alone, gather_for_metrics=alone, reduce=alone),
        _metrics=metrics,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=1.0,
        loss_type="bnpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros(SHAPE, dtype=torch.int64)
    batch = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": inputs["mask"],
        "advantages": torch.zeros(SHAPE[0], dtype=torch.float64),
        "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs["ref_logprobs"],
    }
    loss = GRPOTrainer._compute_loss(trainer, None, batch)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logprobs)[0]}


def record_correction(inputs: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """Return weights, kept tokens, and metrics."""
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    weights, saved, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        inputs["old_logprobs"],
        inputs["rollout_logprobs"],
        inputs["mask"],
        **{name: config[name] for name in names if name in config},
    )
    return {
        "config": config,
        "weights": None if weights is None else weights.batch["rollout_is_weights"],
        "kept": saved,
        "metrics": {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()},
    }


def presets() -> dict[str, dict[str, Any]]:
    """Return verl's configurations by the name of their constructor."""
    names = [name for name in dir(RolloutCorrectionConfig) if re.match("decoupled_|bypass_(ppo|pg)|disabled", name)]
    configs = {name: asdict(getattr(RolloutCorrectionConfig, name)()) for name in names}
    return {name: {key: c[key] for key in c if not key.startswith("_")} for name, c in configs.items()}


def make_outputs(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return all results of the other libraries that this library computes too."""
    return {
        "aggregation": {mode: record_aggregation(inputs, mode) for mode in AGGREGATIONS},
        "kl": {kind: record_kl(inputs, kind) for kind in ESTIMATORS},
        "kl_trl": {"plain": record_importance(inputs, False), "importance": record_importance(inputs, True)},
        "presets": {name: record_correction(inputs, config) for name, config in presets().items()},
        "further": {name: record_correction(inputs, config) for name, config in FURTHER.items()},
    }


def main() -> None:
    """Write corrections.json next to this file."""
    torch.set_num_threads(1)
    inputs = make_inputs()
    record = {
        "source": {
            "packages": {name: importlib.metadata.version(name) for name in ("verl", "trl", "torch")},
            "command": "python tests/golden/make_corrections.py",
            "seed": SEED,
            "date": datetime.date.today().isoformat(),
        },
        "inputs": inputs,
        "outputs": make_outputs(inputs),
    }
    write("corrections", record)


if __name__ == "__main__":
    main()
