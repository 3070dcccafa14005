"""A new algorithm is an object in a file of yours: REINFORCE with the batch's mean reward as baseline.

An estimator turns rewards into advantages, a policy loss turns advantages into losses of tokens, an aggregation turns
those into one loss. This estimator is new, the loss is one of ours. From YAML both are reached by their dotted path;
`my_algorithms.py` is next to the configuration or in the working directory, and PYTHONPATH is not needed:

    model:
      class_path: lightning_rlhf.RLHFModule
      init_args:
        advantages: {class_path: my_algorithms.MeanBaseline, init_args: {scale: 2.0}}
        policy_loss: {class_path: ReinforceLoss}

    python examples/03_new_algorithm.py
"""

import sys
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from torch import Tensor

from lightning_rlhf import FromConfig, PromptDataModule, RLHFModule
from lightning_rlhf.callbacks import RolloutLoop, complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine


@dataclass(frozen=True)
class MeanBaseline(AdvantageEstimator):
    """The advantage of every token is its response's reward less the mean reward of the batch, over all ranks."""

    scale: float = 1.0

    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """Return (B, T) advantages, twice: they are also the targets of a critic."""
        counts = inputs.mask.any(dim=1)  # responses that only fill the batch do not
        total, count = ranks.sum(torch.stack([(inputs.reward * counts).sum(), counts.sum()]))
        advantages = self.scale * (inputs.reward - total / count).unsqueeze(1) * inputs.mask
        return advantages, advantages


def distinct_letters(completions: list[str]) -> list[float]:
    """Return the fraction of the four letters that were used."""
    return [len(set(text)) / 4 for text in completions]


def main(run_directory: str = "runs/examples/new_algorithm") -> float:
    """Train, and return the mean reward of the last step."""
    L.seed_everything(0)
    architecture = {"model_type": "llama", "vocab_size": 8, "hidden_size": 32, "head_dim": 32, "num_attention_heads": 1}
    architecture |= {
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "initializer_range": 0.2,
    }
    module = RLHFModule(
        actor=FromConfig(architecture),
        advantages=MeanBaseline(),
        policy_loss=ReinforceLoss(),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        minibatch_size=64,
    )
    data = PromptDataModule(
        train=InMemory([{"prompt": "ab"}] * 1280), tokenizer=CharacterTokenizer("abcd"), batch_size=64, max_tokens=8
    )
    loop = RolloutLoop([RewardFunction(distinct_letters)], engine=TransformersEngine(), max_response_tokens=6)
    trainer = L.Trainer(
        max_steps=20,
        callbacks=complete([loop]),
        default_root_dir=run_directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["reward/distinct_letters"])


if __name__ == "__main__":
    print(f"distinct letters, as a fraction of four: {main(*sys.argv[1:]):.2f}")
