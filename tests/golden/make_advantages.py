"""Record the advantages that verl and TRL compute for fixed inputs. README.md has the command."""

import datetime
import importlib.metadata
import importlib.util
import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

SEED = 20261122
GROUP = [5, 9, 5, 7, 9, 5, 7, 9, 7, 9, 5, 5]
WIDTH = 7
DRAWS = 64


def make_inputs() -> dict[str, Tensor]:
    """Return random numbers of three decimals, which the file stores exactly."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).round(decimals=3)

    rows = len(GROUP)
    lengths = torch.tensor([7, 5, 3, 6, 5, 1, 4, 2, 4, 7, 6, 2])
    whole = torch.arange(WIDTH) < lengths.unsqueeze(1)
    holes = torch.rand(rows, WIDTH, generator=generator) < 0.3
    holes[:, 0] = False
    distributions = torch.softmax(2 * normal(rows, WIDTH, 8), dim=-1)
    keys = 3
    named = normal(rows, keys)
    named[0, 1] = named[3, 0] = named[4, 0] = torch.nan  # did not apply to some responses
    named[7] = torch.nan  # to this one nothing did
    return {
        "group": torch.tensor(GROUP),
        "whole": whole.double(),  # policy tokens only
        "holed": (whole & ~holes).double(),  # with tokens of an environment in between
        "rewards": normal(rows, WIDTH),
        # Group 9 earns nothing, the others something each: there verl's alpha of GPG is the paper's.
        "outcomes": normal(rows).masked_fill(torch.tensor(GROUP) == 9, 0),
        "values": normal(rows, WIDTH),
        "final_values": normal(rows),
        "greedy_reward": normal(rows),
        "logprobs": distributions[..., 0].log().round(decimals=6),
        "sum_pi_squared": (distributions**2).sum(dim=-1).round(decimals=6),
        "weights": normal(rows, WIDTH).abs(),
        "named_rewards": named,
        "scores": normal(DRAWS).clamp(-1.5, 1.5),  # several share the first and the last place
    }


def record_verl(inputs: dict[str, Tensor], mask: Tensor) -> dict[str, Any]:
    """Return advantages, and also returns where verl's are future rewards."""
    index = np.array(GROUP)
    rewards = inputs["rewards"] * mask
    group = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    energy = {"old_log_probs": inputs["logprobs"], "sum_pi_squared": inputs["sum_pi_squared"]}
    last_only = torch.zeros_like(rewards)
    last_only[:, 0] = inputs["outcomes"]
    # Cut responses: discounting the value after the end is adding it to the reward of the last token.
    end = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)
    gamma, lam = 0.9, 0.7
    continued = rewards.scatter_add(1, end, gamma * inputs["final_values"].unsqueeze(1))
    gae = core_algos.compute_gae_advantage_return(continued, inputs["values"], mask, gamma, lam)
    plus_plus = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=gamma)
    )
    records = {
        "gae_truncated": {"gamma": gamma, "lam": lam, "advantages": gae[0], "returns": gae[1]},
        "grpo": core_algos.compute_grpo_outcome_advantage(**group)[0],
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(**group, norm_adv_by_std_in_grpo=False)[0],
        "grpo_passk": core_algos.compute_grpo_passk_outcome_advantage(**group, config={})[0],
        "grpo_passk_plain": core_algos.compute_grpo_passk_outcome_advantage(
            **group, config={"norm_adv_by_std_in_grpo": False}
        )[0],
        "rloo": core_algos.compute_rloo_outcome_advantage(**group)[0],
        "opo": core_algos.compute_opo_outcome_advantage(**group)[0],
        "gpg": core_algos.compute_gpg_outcome_advantage(**(group | {"token_level_rewards": last_only}))[0],
        "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**group)[0],
        "reinforce_plus_plus": {"gamma": gamma, "advantages": plus_plus[0], "returns": plus_plus[1]},
        "remax": core_algos.compute_remax_outcome_advantage(rewards, inputs["greedy_reward"], mask)[0],
    }
    if (mask == inputs["whole"]).all():  # with gaps, verl's tail is counted in tokens and cut in columns
        records |= _record_baselines(core_algos.compute_optimal_token_baseline_advantage, group | energy, inputs)
    return records | {
        f"tool_{name}": numbers
        for name, numbers in _record_baselines(
            core_algos.compute_multi_turn_optimal_token_baseline_advantage, group | energy, inputs
        ).items()
    }


def _record_baselines(compute: Any, arguments: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "otb": compute(**arguments)[0],
        "otb_tail": compute(**arguments, handle_zero_tail=False)[0],
        "otb_weights": compute(**arguments, rollout_is_weights=inputs["weights"])[0],
    }


def record_draws(scores: Tensor) -> list[dict[str, Any]]:
    """Return the rows that PF-PPO draws."""
    records = []
    for method, power in (("pow", 2.0), ("pow", 0.5), ("max_min", 2.0), ("max_random", 2.0)):
        batch = _Batch(token_level_scores=scores.unsqueeze(1), row=torch.arange(len(scores)))
        data = SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={})
        torch.manual_seed(SEED)
        rows = core_algos.compute_pf_ppo_reweight_data(data, method, power).batch["row"]
        records.append({"method": method, "power": power, "seed": SEED, "rows": rows})
    return records


class _Batch(dict[str, Tensor]):
    """The parts of a TensorDict that verl uses."""

    batch_size = 0


def record_trl(rewards_per_func: Tensor, trainer: str, **options: Any) -> dict[str, Any]:
    """Return advantages in groups of four, by running TRL's own lines, which are in the middle of a long method."""
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("install trl first")
    lines = (Path(package.submodule_search_locations[0]) / "trainer" / f"{trainer}_trainer.py").read_text()
    start = lines.index("        unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)")
    end = lines.index("advantages = torch.nan_to_num(advantages, nan=0.0)", start)
    code = textwrap.dedent(lines[start : lines.index("\n", end)])
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    names = {
        "self": SimpleNamespace(reward_weights=weights, reward_funcs=[0, 1, 2], reward_clip_range=None, **options),
        "torch": torch,
        "nanstd": _nanstd,
        "device": "cpu",
        "rewards_per_func": rewards_per_func.clone(),
        "num_generations": 4,
    }
    exec(code, names)
    return {"reward_weights": weights, "eps": 1e-4, "advantages": names["advantages"]}


def _nanstd(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the standard deviation (divisor n - 1) without NaNs, like trl.trainer.utils.nanstd without its import."""
    mean = torch.nanmean(values, dim=dim, keepdim=True)
    count = (~values.isnan()).sum(dim=dim, keepdim=True)
    std = (((values - mean) ** 2).nansum(dim=dim, keepdim=True) / (count - 1)).sqrt()
    return std if keepdim or dim is None else std.squeeze(dim)


def main() -> None:
    """Write advantages.json next to this file."""
    inputs = make_inputs()
    named, applied = inputs["named_rewards"], inputs["named_rewards"].nan_to_num(0.25)
    packages = ("verl", "trl", "torch")
    record = {
        "source": {name: importlib.metadata.version(name) for name in packages}
        | {
            "command": "python tests/golden/make_advantages.py",
            "seed": SEED,
            "date": datetime.date.today().isoformat(),
        },
        "inputs": inputs,
        "verl": {kind: record_verl(inputs, inputs[kind]) for kind in ("whole", "holed")},
        "draws": record_draws(inputs["scores"]),
        "trl": {
            "gdpo": record_trl(named, "grpo", multi_objective_aggregation="normalize_then_sum", scale_rewards="group"),
            "grpo": record_trl(
                applied, "grpo", multi_objective_aggregation="sum_then_normalize", scale_rewards="group"
            ),
            "rloo": record_trl(applied, "rloo", normalize_advantages=False, beta=0.0),
        },
    }
    text = re.sub(r"\bNaN\b", '"nan"', json.dumps(record, indent=1, default=Tensor.tolist))
    one_line_per_row = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    Path(__file__).with_name("advantages.json").write_text(one_line_per_row + "\n")


if __name__ == "__main__":
    main()
