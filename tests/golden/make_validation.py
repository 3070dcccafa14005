"""Record the results of verl and scipy for sampled answers and for a batch. README.md has the command."""

import datetime
import importlib.metadata
import itertools
import statistics
from typing import Any

import scipy.stats
import torch
from make_golden import write
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.metric_utils import (
    calc_maj_val,
    compute_data_metrics,
    compute_variance_proxy_metrics,
    process_validation_metrics,
)

SEED = 20261122
REWARDS = ([0.5, -1.25, 3.0, 0.5, 2.0, -0.75], [0, 1, 0, 0, 1, 1], [1.0, 1.0, 1.0, 1.0], [-2.0, 7.5, 1.0, 0.0, 4.0])
VOTES = (
    (["a", "b", "a", "c", "b", "a"], [1.0, 0.0, 1.0, 0.5, 0.0, 1.0]),
    (["a", "b", "a", "b", "c", "d"], [1.0, 0.25, 0.5, 0.0, -1.0, 2.0]),  # an answer need not always earn the same
    (["a", "b", "c", "d", "e"], [1.0, 0.0, 0.0, 0.5, 0.0]),
    (["a", "a", "a", "a"], [1.0, 0.0, 0.0, 1.0]),
)
generator = torch.Generator().manual_seed(SEED)


def normal(scale: float, *shape: int) -> Tensor:
    """Return random numbers of three decimals, which the file stores exactly."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)


def record_moments() -> list[dict[str, Any]]:
    """Return probability-weighted moments b_0 to b_3 from scipy's L-moments; k b_(k-1) is the best of k."""
    records = []
    for rewards in REWARDS:
        l1, l2, l3, l4 = scipy.stats.lmoment(rewards, order=[1, 2, 3, 4], standardize=False)
        b0, b1 = l1, (l2 + l1) / 2
        b2 = (l3 + 6 * b1 - b0) / 6
        b3 = (l4 + 30 * b2 - 12 * b1 + b0) / 20
        records.append({"rewards": rewards, "moments": [float(b) for b in (b0, b1, b2, b3)]})
    return records


def record_majorities() -> list[dict[str, Any]]:
    """Return verl's majority over all draws of k in every order, which averages its choice in ties."""
    records = []
    for answers, rewards in VOTES:
        samples = [{"pred": answer, "val": reward} for answer, reward in zip(answers, rewards, strict=True)]
        worth = [
            statistics.fmean(calc_maj_val(list(draw), "pred", "val") for draw in itertools.permutations(samples, k))
            for k in range(1, len(samples) + 1)
        ]
        records.append({"answers": answers, "rewards": rewards, "by_k": worth})
    return records


def record_means() -> list[dict[str, Any]]:
    """Return verl's mean and standard deviation of the rewards of each prompt."""
    records = []
    for rewards in REWARDS:
        size = len(rewards)
        result = process_validation_metrics(["data"] * size, ["prompt"] * size, {"reward": rewards})["data"]["reward"]
        records.append({"rewards": rewards, "mean": float(result[f"mean@{size}"]), "std": float(result[f"std@{size}"])})
    return records


def record_batch() -> dict[str, Any]:
    """Return verl's metrics of a batch whose prompts and responses are padded, with weights and without."""
    lengths, prompts = torch.tensor([5, 3, 1, 4, 5, 2]), torch.tensor([2, 2, 3, 3, 1, 1])
    mask = (torch.arange(5) < lengths.unsqueeze(1)).double()
    prompt_mask = (torch.arange(3) >= 3 - prompts.unsqueeze(1)).double()  # verl pads prompts on the left
    logprobs = -normal(1.5, 6, 5).abs() - 0.01
    inputs = {
        "mask": mask,
        "prompt_lengths": prompts,
        "reward": normal(1.0, 6),
        "penalties": (normal(0.1, 6, 5) * mask).round(decimals=3),
        "advantages": normal(1.0, 6, 5) * mask,
        "returns": normal(400.0, 6, 5) * mask,
        "values": normal(400.0, 6, 5) * mask,
        "logprobs": logprobs,
        "sum_pi_squared": (logprobs.exp() ** 2 + normal(0.2, 6, 5).abs()).round(decimals=3),
        "weights": (normal(0.3, 6, 5).abs() + 0.5) * mask,
    }
    scores = torch.zeros(6, 5, dtype=torch.float64)
    scores[range(6), lengths - 1] = inputs["reward"]
    tensors = {name: inputs[name] for name in ("advantages", "returns", "values", "sum_pi_squared")}
    tensors |= {"token_level_scores": scores, "token_level_rewards": scores - inputs["penalties"]}
    tensors |= {"prompts": torch.zeros(6, 3), "responses": torch.zeros(6, 5), "response_mask": mask}
    tensors |= {"attention_mask": torch.cat([prompt_mask, mask], dim=1), "old_log_probs": logprobs}
    batch, weighted = DataProto.from_dict(tensors), tensors | {"rollout_is_weights": inputs["weights"]}
    outputs = {
        "data": {name: float(value) for name, value in compute_data_metrics(batch, use_critic=True).items()},
        "variance": compute_variance_proxy_metrics(batch),
        "variance_weighted": compute_variance_proxy_metrics(DataProto.from_dict(weighted)),
    }
    return {"inputs": inputs, "outputs": outputs}


def main() -> None:
    """Write validation.json next to this file."""
    source = {
        "packages": {name: importlib.metadata.version(name) for name in ("verl", "scipy", "torch")},
        "command": "python tests/golden/make_validation.py",
        "seed": SEED,
        "date": datetime.date.today().isoformat(),
    }
    records = {
        "moments": record_moments(),
        "majorities": record_majorities(),
        "means": record_means(),
        "batch": record_batch(),
    }
    write("validation", {"source": source, **records})


if __name__ == "__main__":
    main()
