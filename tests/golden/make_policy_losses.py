"""Record the policy losses of verl and TRL for fixed inputs. README.md has the commands."""

import datetime
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SEED = 20261122
FILE = Path(__file__).with_name("policy_losses.json")


def make_inputs() -> dict[str, Tensor]:
    """Return random numbers of three decimals, which the file stores exactly."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(scale: float, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)

    old_logprobs = -normal(1.5, 6, 7).abs() - 0.01
    return {
        # Full rows, a short one, one with two holes (tokens of an environment), one of a single token.
        "mask": torch.tensor(
            [
                [1, 1, 1, 1, 1, 1, 1],
                [1, 1, 1, 1, 0, 0, 0],
                [1, 1, 0, 1, 0, 1, 0],
                [1, 0, 0, 0, 0, 0, 0],
                [1, 1, 1, 1, 1, 1, 0],
                [1, 1, 1, 0, 0, 0, 0],
            ],
            dtype=torch.float64,
        ),
        "old_logprobs": old_logprobs,
        # Still log-probabilities; ratios from about 0.2 to 5, so that every clip binds.
        "logprobs": (old_logprobs + normal(0.6, 6, 7)).clamp(max=-0.001).round(decimals=3),
        "advantages": normal(1.0, 6, 7),
        # One advantage for each response, as GRPO gives; of both signs.
        "response_advantages": torch.tensor([1.25, -0.75, 0.5, -1.5, -0.25, 2.0], dtype=torch.float64),
    }


def gradient_of(compute: Callable[[Tensor], Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss of the whole batch, and its gradient."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss = compute(logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss, "gradient": gradient}


def record_verl(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return each of verl's losses; ``advantages`` is the kind of the input that was used."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    def record(mode: str, aggregation: str, advantages: str = "advantages", **settings: Any) -> dict[str, Any]:
        names = PolicyLossConfig.__dataclass_fields__
        of_loss = {name: value for name, value in settings.items() if name in names}
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(**of_loss),
            **{name: value for name, value in settings.items() if name not in names},
        )
        arguments = inputs[advantages]
        arguments = arguments if arguments.dim() == 2 else arguments.unsqueeze(1).expand_as(inputs["mask"]).clone()
        metrics: dict[str, float] = {}

        def compute(logprobs: Tensor) -> Tensor:
            loss, result = core_algos.get_policy_loss_fn(mode)(
                inputs["old_logprobs"], logprobs, arguments, inputs["mask"], aggregation, config
            )
            metrics.update(result)
            return loss

        return {
            "mode": mode,
            "aggregation": aggregation,
            "advantages": advantages,
            "settings": settings,
            **gradient_of(compute, inputs),
            "metrics": metrics,
        }

    narrow = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "clip_ratio_c": 1.5}
    whole, by_response = "response_advantages", "seq-mean-token-mean"
    return {
        "vanilla": record("vanilla", "seq-mean-token-sum", **narrow),
        "gpg": record("gpg", "token-mean"),
        "cispo": record("cispo", "token-mean", clip_ratio_low=0.3, clip_ratio_high=0.4),
        "cispo_unbounded": record("cispo", "token-mean", clip_ratio_low=10.0, clip_ratio_high=0.2),
        "sapo": record("sapo", by_response, tau_pos=1.0, tau_neg=1.4),
        "dro": record("dro", "token-mean", dro_beta=0.7),
        "dppo_tv": record("dppo_tv", "token-mean", clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=1.3),
        "dppo_kl": record("dppo_kl", "token-mean", clip_ratio_low=0.02, clip_ratio_high=0.01, clip_ratio_c=1.3),
        "gspo": record("gspo", by_response, whole, clip_ratio_low=0.05, clip_ratio_high=0.15),
        "gspo_token_mean": record("gspo", "token-mean", whole, clip_ratio_low=0.3, clip_ratio_high=0.4),
        "geo_mean": record("geo_mean", by_response, whole, clip_ratio_low=0.3, clip_ratio_high=0.4),
        # A ratio of 1 takes every candidate, so that nothing is random.
        "clip_cov": record(
            "clip_cov",
            "token-mean",
            clip_ratio_low=0.2,
            clip_ratio_high=0.3,
            clip_cov_ratio=1.0,
            clip_cov_lb=0.3,
            clip_cov_ub=1.5,
        ),
        "kl_cov": record("kl_cov", "token-mean", kl_cov_ratio=0.2, ppo_kl_coef=0.3),
    }


def record_trl(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return each of TRL's losses, by calling the method on an object with only the attributes that it uses."""
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = inputs["mask"].long()

    def record(loss_type: str, level: str, trainer: type = GRPOTrainer, **settings: float) -> dict[str, Any]:
        arguments = {name: value for name, value in settings.items() if not name.startswith("epsilon")}
        trainer_like = SimpleNamespace(
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_low=settings.get("epsilon"),
            epsilon_high=settings.get("epsilon_high"),
            args=SimpleNamespace(delta=None, **arguments),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            beta=0.0,
            use_vllm=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=False),
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            accelerator=SimpleNamespace(
                num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value
            ),
            _metrics={"eval": {}},
        )
        trainer_like._metrics["eval"] = type(
            "Lists", (dict,), {"__missing__": lambda self, key: self.setdefault(key, [])}
        )()

        def compute(logprobs: Tensor) -> Tensor:
            trainer_like._get_per_token_logps_and_entropies = lambda *_, **__: (
                logprobs,
                torch.zeros_like(logprobs),
                None,
            )
            batch = {
                "prompt_ids": mask[:, :1],
                "prompt_mask": mask[:, :1],
                "completion_ids": mask,
                "completion_mask": mask,
                "advantages": inputs["response_advantages"].unsqueeze(1) if trainer is GRPOTrainer
                else inputs["response_advantages"],
                "old_per_token_logps": inputs["old_logprobs"],
                "num_items_in_batch": mask.sum(),
            }  # fmt: skip
            loss: Tensor = trainer._compute_loss(trainer_like, None, batch)
            return loss

        recorded = gradient_of(compute, inputs)
        metrics = {name: values[0] for name, values in trainer_like._metrics["eval"].items()}
        return {"loss_type": loss_type, "level": level, "settings": settings, **recorded, "metrics": metrics}

    return {
        "cispo": record("cispo", "token", epsilon_high=1.4),
        "sapo": record("sapo", "token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.4),
        "gspo": record("grpo", "sequence", epsilon=0.05, epsilon_high=0.15),
        "luspo": record("luspo", "sequence", epsilon=0.05, epsilon_high=0.15),
        "vespo": record("vespo", "token", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0),
        "gmpo": record("grpo", "token", GMPOTrainer, epsilon=0.3, epsilon_high=0.4),
    }


def main(package: str) -> None:
    """Write the results of one package into policy_losses.json and keep those of the other."""
    torch.set_default_dtype(torch.float64)  # or TRL's temperatures are float32
    inputs = make_inputs()
    record = json.loads(FILE.read_text()) if FILE.exists() else {}
    record["inputs"] = inputs
    record[package] = {
        "source": {
            "package": package,
            "version": importlib.metadata.version(package),
            "torch": torch.__version__,
            "command": f"python tests/golden/make_policy_losses.py {package}",
            "seed": SEED,
            "date": datetime.date.today().isoformat(),
        },
        "outputs": {"verl": record_verl, "trl": record_trl}[package](inputs),
    }
    text = json.dumps(record, indent=1, default=Tensor.tolist)
    one_line_per_row = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    FILE.write_text(one_line_per_row + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
