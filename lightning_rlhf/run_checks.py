"""Checks of a run's settings that need no model, and no library that takes long to import."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lightning_rlhf.expected_errors import UsageError


def check_loops(module: str, count: int, provided: bool) -> None:
    """Validate that one callback provides the rollouts of a run.

    Args:
        module: name of the module's class.
        count: number of RolloutLoops.
        provided: whether a callback provides rollouts, a RolloutLoop or an own one.

    Raises:
        ValueError: no callback provides rollouts, or there are several RolloutLoops.
    """
    if count > 1:
        raise UsageError(
            f"trainer.callbacks has {count} RolloutLoops, allowed: one; put all rewards into its list of rewards"
        )
    if not provided:
        raise UsageError(
            f"{module} trains on rollouts, and no callback provides them: add lightning_rlhf.callbacks.RolloutLoop to "
            "trainer.callbacks"
        )


def check_val_metric(name: str | None, labels: Sequence[str]) -> None:
    """Validate ``val_metric`` of a RolloutLoop, which may be None.

    Raises:
        ValueError: it is not the name of a reward.
    """
    if name is not None and name not in labels:
        near = difflib.get_close_matches(name, labels, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"val_metric must be the name of a reward, one of {list(labels)}, got {name!r}{hint}")


def check_batch_size(batch_size: int, rows: int) -> None:
    """Validate that there are training rows for a batch.

    Args:
        batch_size: rows of a step.
        rows: number of training rows.

    Raises:
        ValueError: a batch would have more rows than there are.
    """
    if rows < batch_size:
        raise UsageError(
            f"batch_size is {batch_size}, but the training data have only {rows} usable rows: use a batch_size of at "
            f"most {rows}, or more data"
        )


def check_group_size(estimator: str, group_size: int) -> None:
    """Validate the number of responses per prompt for an estimator that compares them.

    Args:
        estimator: name of the estimator's class.
        group_size: responses per prompt.

    Raises:
        ValueError: there is one response.
    """
    if group_size < 2:
        raise UsageError(
            f"{estimator} compares the responses to one prompt: group_size must be at least 2, got {group_size}"
        )


def check_minibatch_size(prompts: int, group_size: int, minibatch_size: int) -> None:
    """Validate that mini-batches divide the responses of a step.

    Args:
        prompts: prompts that a step trains on.
        group_size: responses per prompt.
        minibatch_size: responses per mini-batch.

    Raises:
        ValueError: a mini-batch would be smaller than the others.
    """
    responses = prompts * group_size
    if responses % minibatch_size:
        divisors = [size for size in range(1, responses + 1) if responses % size == 0]
        distance = min(abs(size - minibatch_size) for size in divisors)
        nearest = " or ".join(str(size) for size in divisors if abs(size - minibatch_size) == distance)
        raise UsageError(
            f"minibatch_size {minibatch_size} does not divide the {responses} responses of a step "
            f"({prompts} prompts x group_size {group_size}): set model.init_args.minibatch_size to {nearest}"
        )


def check_quantization(role: str, quantization: str, has_adapters: bool) -> None:
    """Raise if quantized weights would be trained.

    Args:
        role: name of a trained role.
        quantization: kind of numbers in which its weights are stored.
        has_adapters: whether adapters are trained in place of the weights.
    """
    if not has_adapters:
        raise UsageError(
            f"the {role}'s weights are stored in {quantization} and cannot be trained: give its source lora, such as "
            f"{{rank: 16, alpha: 32}}, or remove quantization"
        )
