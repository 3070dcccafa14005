"""What TRL's trainers minimize, and how: their losses, optimizer and schedule as options of a module."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.given import GivenOptions
from lightning_rlhf.extras.migration.parts import trl_optimizers
from lightning_rlhf.extras.schema.known import schedules

_PREFERENCE = "lightning_rlhf.extras.algorithms.preference_losses"
_DPO = {
    "sigmoid": "DPOLoss", "hinge": "HingeLoss", "ipo": "IPOLoss", "robust": "RobustDPOLoss",
    "apo_zero": "APOZeroLoss", "apo_down": "APODownLoss",
}  # fmt: skip
_AGGREGATION = "lightning_rlhf.objectives.aggregation"
# How TRL's losses of GRPO add up their tokens.
_AGGREGATIONS = {
    "grpo": "SequenceMeanTokenMean", "sapo": "SequenceMeanTokenMean", "bnpo": "TokenMean", "dapo": "TokenMean",
    "cispo": "TokenMean", "vespo": "TokenMean", "dr_grpo": "SequenceMeanTokenSum", "luspo": "SequenceMeanTokenSum",
}  # fmt: skip
_SEQUENCES = "lightning_rlhf.extras.algorithms.sequence_policy_losses"
_SAPO = ("tau_pos", "tau_neg")
_VESPO = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")


def grpo_loss(options: GivenOptions) -> tuple[str, dict[str, Any]]:
    """Return the module, and its options for the loss, of TRL's GRPO trainer."""
    kind = str(options.carry("loss_type"))
    if kind not in _AGGREGATIONS:
        options.leave("loss_type")
        kind = "dapo"
    aggregation: dict[str, Any] = {"class_path": f"{_AGGREGATION}.{_AGGREGATIONS[kind]}"}
    if kind == "dr_grpo":
        # Read here without being carried over, which the options of the responses do.
        aggregation["init_args"] = {"scale": float(options.values["max_completion_length"])}
    if kind == "bnpo":
        options.note("loss_type: 'bnpo' is the mean over the tokens of a micro-batch in TRL, of an update here")
    loss: dict[str, Any] = {"aggregation": aggregation, "advantages": _advantages(options)}
    module, policy_loss = _policy_loss(options, kind)
    if kind == "dr_grpo" and module == "GRPOModule" and "normalize_std" in loss["advantages"]:
        module = "DrGRPOModule"
    if policy_loss:
        loss["policy_loss"] = policy_loss
    loss["kl_loss"] = {"coef": float(options.carry("beta")), "estimator": "k3"}
    if options.carry("use_bias_correction_kl") and loss["kl_loss"]["coef"]:
        loss["kl_loss"]["importance"] = True
    if entropy := float(options.carry("entropy_coef")):
        loss["ent_coef"] = entropy
    if options.carry("use_vllm") and options.carry("vllm_importance_sampling_correction"):
        loss["correction"] = _correction(options)
    return module, loss


def _correction(options: GivenOptions) -> dict[str, Any]:
    """Return the weights of the gap between vLLM and the actor, which TRL has by default."""
    level, _, mode = str(options.carry("vllm_importance_sampling_mode")).partition("_")
    upper = options.carry("vllm_importance_sampling_clip_max")
    upper = options.carry("vllm_importance_sampling_cap", upper)  # the earlier name, which counts in TRL
    arguments = {"level": level, "mode": mode, "upper": float(upper)}
    if lower := options.carry("vllm_importance_sampling_clip_min"):
        arguments["lower"] = float(lower)
    return {"class_path": "lightning_rlhf.objectives.corrections.RolloutCorrection", "init_args": arguments}


def _advantages(options: GivenOptions) -> dict[str, Any]:
    scale = options.carry("scale_rewards")
    if scale == "batch":
        options.leave("scale_rewards", "the deviation of the whole batch is not here: that of the group is written")
    elif scale not in ("group", "none", True, False):
        options.leave("scale_rewards", "group and none are here: the deviation of the group is written")
    return {"eps": 1e-4} | ({"normalize_std": False} if scale in ("none", False) else {})


def _policy_loss(options: GivenOptions, kind: str) -> tuple[str, dict[str, Any]]:
    """Return the module and its policy loss."""
    level = options.carry("importance_sampling_level")
    if level not in ("token", "sequence"):
        options.leave("importance_sampling_level", "token and sequence are here: that of a token is written")
    low = float(options.carry("epsilon"))
    high = float(options.carry("epsilon_high", low))
    clip = {"clip_range_low": low, "clip_range_high": high}
    if level == "sequence" and kind in ("cispo", "sapo"):
        options.leave("importance_sampling_level", f"{kind} has a ratio for each token here")
    if kind == "cispo":
        if high > 1:
            return "CISPOModule", {"clip_range_high": round(high - 1, 6)}
        bound = f"{high} bounds CISPO's weights in TRL, all of which it makes smaller; they reach 5 here"
        options.leave("epsilon_high", bound)
        if "epsilon_high" not in options.given:
            options.note(f"epsilon_high: {bound}")
        return "CISPOModule", {}
    if kind == "sapo":
        names = {ours: f"sapo_temperature_{ours.removeprefix('tau_')}" for ours in _SAPO}
        return "SAPOModule", {ours: float(options.carry(name)) for ours, name in names.items() if options.is_set(name)}
    if kind == "vespo":
        shape = {name: float(options.carry(f"vespo_{name}")) for name in _VESPO if options.is_set(f"vespo_{name}")}
        return "GRPOModule", {"class_path": f"{_SEQUENCES}.VESPOLoss", "init_args": shape}
    if level == "sequence":
        name = "LUSPOLoss" if kind == "luspo" else "GSPOLoss"
        return "GSPOModule", {"class_path": f"{_SEQUENCES}.{name}", "init_args": clip}
    return "GRPOModule", clip


def _rloo_loss(options: GivenOptions) -> dict[str, Any]:
    return {"kl_reward": {"coef": float(options.carry("beta")), "estimator": "k1"}}


def _reward_loss(options: GivenOptions) -> dict[str, Any]:
    coefficient = options.carry("center_rewards_coefficient")
    return {"loss": {"center_coef": float(coefficient)}} if coefficient else {}


def _dpo_loss(options: GivenOptions) -> dict[str, Any]:
    loss = options.carry("loss_type")
    kinds = loss if isinstance(loss, list) else [loss]
    arguments: dict[str, Any] = {"beta": float(options.carry("beta"))}
    supervised: dict[str, float] = {}
    if len(kinds) == 2 and kinds[1] == "sft":
        weights = options.carry("loss_weights", [1.0, 1.0])
        if len(weights) != 2:
            raise UsageError(f"loss_weights has {len(weights)} numbers for two losses")
        kinds, supervised = kinds[:1], {"sft_coef": float(weights[1]) / float(weights[0])}
    if len(kinds) != 1 or kinds[0] not in _DPO:
        options.leave("loss_type")
        kinds = ["sigmoid"]
    if kinds[0] in ("sigmoid", "robust") and (smoothing := float(options.carry("label_smoothing"))):
        arguments["label_smoothing"] = smoothing
    loss = {"class_path": f"{_PREFERENCE}.{_DPO[kinds[0]]}", "init_args": arguments}
    return {"loss": loss, **supervised, **({"ref": "start"} if options.carry("precompute_ref_log_probs") else {})}


def _kto_loss(options: GivenOptions) -> dict[str, Any]:
    names = ("desirable_weight", "undesirable_weight", "beta")
    return {"loss": {name: float(options.carry(name)) for name in names}}


def _orpo_loss(options: GivenOptions) -> dict[str, Any]:
    options.note("the supervised loss is over the preferred answer here, over its prompt too in TRL's ORPOTrainer")
    loss = {"class_path": f"{_PREFERENCE}.ORPOLoss", "init_args": {"beta": float(options.carry("beta"))}}
    return {"loss": loss, "sft_coef": 1.0}


def _cpo_loss(options: GivenOptions) -> dict[str, Any]:
    """Return the loss of TRL's CPO trainer, which is SimPO's without its margin and its mean."""
    kind = options.carry("loss_type")
    if kind not in ("sigmoid", "simpo"):
        options.leave("loss_type", "without a reference, sigmoid and simpo are here")
    margin = float(options.carry("simpo_gamma")) if kind == "simpo" else 0.0
    arguments = {"beta": float(options.carry("beta")), "margin": margin, "length_normalized": kind == "simpo"}
    loss = {"class_path": f"{_PREFERENCE}.SimPOLoss", "init_args": arguments}
    return {"loss": loss, "sft_coef": float(options.carry("cpo_alpha"))}


# Functions that return a module's options for the loss of a trainer; that of GRPO decides its module, too.
LOSSES = {
    "rloo": _rloo_loss, "reward": _reward_loss, "dpo": _dpo_loss, "kto": _kto_loss, "orpo": _orpo_loss,
    "cpo": _cpo_loss,
}  # fmt: skip


def optimizer(options: GivenOptions) -> dict[str, Any]:
    """Return the optimizer of a module."""
    adamw: dict[str, Any] = {
        "lr": float(options.carry("learning_rate")),
        "weight_decay": float(options.carry("weight_decay")),
        "betas": [float(options.carry(name)) for name in ("adam_beta1", "adam_beta2")],
        "eps": float(options.carry("adam_epsilon")),
    }
    kind = trl_optimizers().get(str(options.carry("optim")))
    if kind is None:
        options.leave("optim", "plain AdamW is written: name another class in optimizer of the module")
    if not kind:
        return adamw
    taken = {name: value for name, value in adamw.items() if name not in kind.get("without", ())}
    return {"class_path": kind["class_path"], "init_args": taken | kind.get("init_args", {})}


def schedule(options: GivenOptions) -> dict[str, Any]:
    """Return the module's option for the learning rate; none if it is constant, which has no warm-up in TRL either."""
    kind, warmup = str(options.carry("lr_scheduler_type")), _warmup(options)
    if kind not in ("constant", *schedules()):
        options.leave("lr_scheduler_type", f"constant here: RunSchedule has {', '.join(schedules())}")
        options.leave("warmup_ratio")
        options.leave("warmup_steps")
    if kind not in schedules():
        return {}
    arguments: dict[str, Any] = {"kind": kind, "warmup_ratio": warmup}
    if further := options.carry("lr_scheduler_kwargs"):
        arguments["arguments"] = further
    return {"lr_scheduler": {"class_path": "lightning_rlhf.modules.schedules.RunSchedule", "init_args": arguments}}


def _warmup(options: GivenOptions) -> float:
    """Return the share of the run in which the learning rate rises."""
    ratio = float(options.carry("warmup_ratio"))
    steps, whole = float(options.carry("warmup_steps")), int(options.carry("max_steps"))
    if steps < 1:
        return steps or ratio
    if whole > 0:
        return min(1.0, steps / whole)
    options.leave("warmup_steps", "the number of steps is not known here: set warmup_ratio of lr_scheduler")
    return ratio
