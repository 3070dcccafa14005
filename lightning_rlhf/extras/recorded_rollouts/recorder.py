"""RolloutRecorder: keeps the responses of each step as the engine returned them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.ahead import packed_completions
from lightning_rlhf.rollout.source import StepRequests
from lightning_rlhf.strategies import ranks
from lightning_rlhf.types import PromptBatch


def step_file(run: Path, step: int) -> Path:
    """Return the file with the responses of a step of a run.

    Args:
        run: directory of the run.
        step: index of the step, from 0.
    """
    return run / "rollouts" / f"recorded-{step + 1:06d}.pt"


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a digest of the tokens of a prompt."""
    return hashlib.blake2b(str(list(token_ids)).encode(), digest_size=8).hexdigest()


def recorded(request: StepRequests) -> dict[str, Any]:
    """Return the completions of a request with the digests of its prompts, as values and tensors."""
    return packed_completions(request) | {"prompts": [digest_of(prompt.token_ids) for prompt in request.prompts]}


class RolloutRecorder(Callback):
    """Writes the responses of each step to ``rollouts/recorded-000001.pt``: tokens, log-probs, versions, conversations.

    Use it to repeat a run's steps without an engine, with ``lightning-rlhf fit --rollouts-from RUN``: with the same
    configuration you get the same numbers, and with another loss you see what it makes of the same responses. A file
    has about 8 bytes per token. Rewards are not in it, because they are computed again.
    """

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate that the run has rollouts.

        Raises:
            UsageError: there is no RolloutLoop.
        """
        check_module(self, pl_module, RLHFModule)
        if not any(isinstance(callback, RolloutLoop) for callback in trainer.callbacks):
            raise UsageError("RolloutRecorder keeps the responses of a RolloutLoop: add it, or remove RolloutRecorder")

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Remove the files of later steps, which an earlier run of this directory has left."""
        if trainer.is_global_zero:
            for path in (Path(trainer.default_root_dir) / "rollouts").glob("recorded-*.pt"):
                if path.stem.removeprefix("recorded-") > f"{trainer.global_step:06d}":
                    path.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Write the file of the step. All ranks."""
        sampled = next(each for each in trainer.callbacks if isinstance(each, RolloutLoop)).sampled
        is_own = pl_module.role_strategy.is_group_leader
        parts = [recorded(each) for each in sampled.requests] if is_own and sampled is not None else []
        of_ranks = ranks.from_all_ranks(parts)
        if not trainer.is_global_zero:
            return
        path = step_file(Path(trainer.default_root_dir), trainer.global_step - 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        torch.save([part for of_rank in of_ranks for part in of_rank], draft)
        draft.replace(path)
