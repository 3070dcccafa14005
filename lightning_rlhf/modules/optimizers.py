"""AdamW with weight decay on matrices only, Muon with AdamW, and fused kernels of Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Muon, Optimizer
from transformers import PreTrainedModel


class MatrixDecayAdamW(AdamW):
    """AdamW with weight decay on matrices only, so that weights of norms and biases do not decay.

    A decay of 0.01 changes little at the rates of RL: 1,000 steps at 1e-6 shrink a weight by 0.001 %.

    Args:
        params: parameters of a model, not groups.
        weight_decay: decay of the matrices.
        options: further arguments of ``torch.optim.AdamW``, such as ``lr``.
    """

    def __init__(self, params: Iterable[Tensor], weight_decay: float = 0.01, **options: Any) -> None:
        matrices, others = _divided(params, lambda parameter: len(_shape(parameter)) > 1)
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        super().__init__([group for group in groups if group["params"]], weight_decay=weight_decay, **options)


class MuonAdamW(Optimizer):
    """Muon for the matrices of hidden layers, and AdamW for embeddings, heads, norms and biases.

    Muon orthogonalises the momentum of the gradient approximately and steps along the result, so all its singular
    values are near 1. We scale its steps to the size of AdamW's, so that you set one learning rate for both.
    See "Muon: An optimizer for hidden layers in neural networks", Jordan et al. 2024, and for the scale "Muon is
    Scalable for LLM Training", Liu et al. 2025, equation 4.

    It works with ``rlhf_single``, ``rlhf_ddp`` and ``rlhf_fsdp``. You cannot use it under DeepSpeed, because the
    orthogonalisation needs whole matrices and DeepSpeed divides them into flat pieces. Muon orthogonalises in bfloat16,
    so results under different strategies differ by that rounding.

    Args:
        params: parameters of a model, not groups, after :func:`mark_parameters_of_adamw` marked the ones for AdamW.
        lr: learning rate of all parameters.
        weight_decay: decay of matrices, embeddings and heads included.
        momentum: decay of Muon's mean of gradients, in [0, 1).
        betas: decays of AdamW's means of gradients and of their squares.
    """

    needs_matrices = True  # read by check_optimizer of lightning_rlhf.strategies.checkpoints.role_state

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        hidden, others = _divided(params, _is_hidden_matrix)
        steps: list[Optimizer] = []
        if hidden:
            options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
            steps.append(Muon(hidden, adjust_lr_fn="match_rms_adamw", **options))
        if others:
            steps.append(MatrixDecayAdamW(others, lr=lr, weight_decay=weight_decay, betas=betas))
            use_fused_kernels(steps[-1])
        self._steps = [(step, len(step.param_groups)) for step in steps]
        super().__init__([group for step in steps for group in step.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)
        for step, count in self._steps:  # a loaded state has other groups and other tensors
            step.param_groups = [next(groups) for _ in range(count)]
            step.state = self.state
            step.step()
        return loss


def mark_parameters_of_adamw(model: nn.Module) -> None:
    """Mark the matrices that MuonAdamW leaves to AdamW, by the attribute ``steps_by_adamw``.

    These are the weights of embeddings and of output heads, and matrices other than the weights of layers, such as the
    decay rates of state-space models (``A_log``).
    """
    for name, parameter in model.named_parameters():
        if not name.endswith("weight"):
            parameter.steps_by_adamw = True  # type: ignore[attr-defined]
    for module in model.modules():
        layers = [module] if isinstance(module, nn.Embedding) else []
        if isinstance(module, PreTrainedModel):
            layers.append(module.get_output_embeddings())
        for layer in layers:
            weight = getattr(layer, "weight", None)
            if isinstance(weight, nn.Parameter):
                weight.steps_by_adamw = True  # type: ignore[attr-defined]


def _divided(
    params: Iterable[Any], condition: Callable[[nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that fulfil a condition, and the others."""
    parameters = list(params)
    chosen = [condition(parameter) for parameter in parameters]
    pairs = list(zip(parameters, chosen, strict=True))
    return [each for each, is_chosen in pairs if is_chosen], [each for each, is_chosen in pairs if not is_chosen]


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter; ZeRO stage 3 empties parameters, and stores their shapes in ``ds_shape``."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _is_hidden_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix of a hidden layer."""
    return parameter.ndim == 2 and min(parameter.shape) > 1 and not hasattr(parameter, "steps_by_adamw")


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let Adam and AdamW step in fused kernels on GPUs and CPUs if no implementation was chosen.

    Without them, torch needs temporary copies of 4 bytes per parameter on a GPU, and reads and writes all states about
    14 times on a CPU: a step of 135 million parameters takes 0.09 instead of 0.55 s on one core. Checkpoints do not
    contain this choice.
    """
    for group in optimizer.param_groups:
        chosen = any(group.get(name) is not None for name in ("foreach", "fused"))
        devices = {parameter.device.type for parameter in group["params"]}
        if isinstance(optimizer, Adam) and not chosen and devices <= {"cuda", "cpu"}:
            group["fused"] = True
