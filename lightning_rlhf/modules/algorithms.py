"""Algorithms that differ from :class:`RLHFModule` in their defaults only."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, SequenceMeanTokenSum
from lightning_rlhf.objectives.group_advantages import GRPO, RLOO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import CISPOLoss, ClippedPolicyLoss, ReinforceLoss
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus, ReMax

_Module = TypeVar("_Module", bound=type)


def with_defaults(**defaults: Any) -> Callable[[_Module], _Module]:
    """Return a class decorator that changes defaults of the constructor's arguments.

    Args:
        **defaults: new defaults by name.

    Raises:
        TypeError: the constructor has no argument of that name.
    """

    def decorate(module: _Module) -> _Module:
        init = module.__init__  # type: ignore[misc]
        signature = inspect.signature(init)
        if unknown := [name for name in defaults if name not in signature.parameters]:
            raise TypeError(f"{module.__name__} has no argument {unknown[0]!r}")

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            passed = signature.bind(self, *args, **kwargs).arguments
            init(self, *args, **{name: value for name, value in defaults.items() if name not in passed}, **kwargs)

        types = typing.get_type_hints(init)
        parameters = [
            parameter.replace(annotation=types.get(name, Any), default=_as_config(defaults[name], types[name]))
            if name in defaults
            else parameter
            for name, parameter in signature.parameters.items()
        ]
        __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        module.__init__ = __init__  # type: ignore[misc]
        return module

    return decorate


def _as_config(value: Any, annotation: Any) -> Any:
    """Return a default as configurations write it; LightningCLI reads other defaults in a constructor's source."""
    if not dataclasses.is_dataclass(value) or type(value) is annotation:
        return value
    changed = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    if changed:
        return {"class_path": path, "init_args": changed}
    return {"class_path": path}


@with_defaults(advantages=GRPO(), kl_loss=KLTerm(0.04, "k3"), aggregation=SequenceMeanTokenMean())
class GRPOModule(RLHFModule):
    """GRPO: compares each response with the mean reward of all responses to its prompt. There is no critic.

    You need at least two responses to each prompt (``group_size`` of RolloutLoop). Rewards are standardised within each
    group, the clipped surrogate is averaged over each response, and the KL to the reference is part of the loss. See
    "DeepSeekMath", Shao et al. 2024, section 4.1.
    """


@with_defaults(advantages=GRPO(normalize_std=False), aggregation=SequenceMeanTokenSum())
class DrGRPOModule(RLHFModule):
    """GRPO without its two biases: it divides neither by the group's deviation nor by the response's length.

    Set the scale of ``aggregation`` to the longest response you allow.
    See "Understanding R1-Zero-Like Training: A Critical Perspective", Liu et al. 2025, section 3.
    """


@with_defaults(advantages=GRPO(), policy_loss=ClippedPolicyLoss(clip_range_low=0.2, clip_range_high=0.28))
class DAPOModule(RLHFModule):
    """GRPO with a wider upper clip, a mean over tokens, and no KL.

    You set the rest of the method elsewhere: ``dynamic_sampling`` of RolloutLoop, and the reward
    :class:`~lightning_rlhf.rewards.shaping.OverlongPenalty`.
    See "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al. 2025, section 3.
    """


@with_defaults(advantages=GRPO(), policy_loss=CISPOLoss())
class CISPOModule(RLHFModule):
    """GRPO that clips the importance weight and treats it as a constant, so that every token keeps its gradient.

    See "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025, section 3.1.
    """


@with_defaults(
    advantages=RLOO(), policy_loss=ReinforceLoss(), kl_reward=KLTerm(0.05), aggregation=SequenceMeanTokenSum()
)
class RLOOModule(RLHFModule):
    """REINFORCE with the mean reward of the other responses to the prompt as baseline.

    See "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs", Ahmadian et
    al. 2024, section 3.
    """


@with_defaults(
    advantages=ReMax(), policy_loss=ReinforceLoss(), kl_reward=KLTerm(0.05), aggregation=SequenceMeanTokenSum()
)
class ReMaxModule(RLHFModule):
    """REINFORCE with the reward of the greedy response to the same prompt as baseline.

    RolloutLoop generates and scores the greedy responses for you. See "ReMax: A Simple, Effective, and Efficient
    Reinforcement Learning Method for Aligning Large Language Models", Li et al. 2024, section 4.
    """


@with_defaults(advantages=ReinforcePlusPlus(), kl_reward=KLTerm(0.01))
class ReinforcePlusPlusModule(RLHFModule):
    """PPO's clipped loss on rewards-to-go that are whitened over the whole batch, without critic and groups.

    See "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", Hu 2025, section 3.
    """
