"""The losses of TRL's trainers as options of a module."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.extras.migration.given import GivenOptions

_PREFERENCE = "lightning_rlhf.objectives.preference_losses"
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
        aggregation["init_args"] = {"scale": float(options.values["max_completion_length"])}
    if kind == "bnpo":
        options.note("loss_type: 'bnpo' is the mean over the tokens of a micro-batch in TRL, of an update here")
    loss: dict[str, Any] = {"aggregation": aggregation, "advantages": _advantages(options)}
    module, policy_loss = _policy_loss(options, kind)
    if kind == "dr_grpo" and module == "GRPOModule" and "normalize_std" in loss["advantages"]:
        module = "DrGRPOModule"
    return module, {**loss, **({"policy_loss": policy_loss} if policy_loss else {})}


def _advantages(options: GivenOptions) -> dict[str, Any]:
    scale = options.carry("scale_rewards", "group")
    if scale == "batch":
        options.leave("scale_rewards", "the deviation of the whole batch is not here: that of the group is written")
    return {"eps": 1e-4} | ({"normalize_std": False} if scale in ("none", False) else {})


def _policy_loss(options: GivenOptions, kind: str) -> tuple[str, dict[str, Any]]:
    """Return the module and its policy loss."""
    level = options.carry("importance_sampling_level", "token")
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
        temperatures = {ours: options.carry(f"sapo_temperature_{ours.removeprefix('tau_')}") for ours in _SAPO}
        return "SAPOModule", {ours: float(value) for ours, value in temperatures.items() if value is not None}
    if kind == "vespo":
        shape = {name: float(value) for name in _VESPO if (value := options.carry(f"vespo_{name}")) is not None}
        return "GRPOModule", {"class_path": f"{_SEQUENCES}.VESPOLoss", "init_args": shape}
    if level == "sequence":
        name = "LUSPOLoss" if kind == "luspo" else "GSPOLoss"
        return "GSPOModule", {"class_path": f"{_SEQUENCES}.{name}", "init_args": clip}
    return "GRPOModule", clip


def dpo_loss(options: GivenOptions) -> dict[str, Any]:
    """Return the options for the loss of TRL's DPO trainer."""
    loss = options.carry("loss_type")
    kinds = loss if isinstance(loss, list) else [loss or "sigmoid"]
    arguments: dict[str, Any] = {"beta": float(options.carry("beta"))}
    supervised: dict[str, float] = {}
    if len(kinds) == 2 and kinds[1] == "sft":
        weights = options.carry("loss_weights", [1.0, 1.0])
        kinds, supervised = kinds[:1], {"sft_coef": float(weights[1]) / float(weights[0])}
    if len(kinds) != 1 or kinds[0] not in _DPO:
        options.leave("loss_type")
        kinds = ["sigmoid"]
    if smoothing := options.carry("label_smoothing"):
        arguments["label_smoothing"] = float(smoothing)
    return {"loss": {"class_path": f"{_PREFERENCE}.{_DPO[kinds[0]]}", "init_args": arguments}, **supervised}


def kto_loss(options: GivenOptions) -> dict[str, Any]:
    """Return the options for the loss of TRL's KTO trainer."""
    weights = {name: options.carry(name, 1.0) for name in ("desirable_weight", "undesirable_weight")}
    return {"loss": weights | {"beta": options.carry("beta")}}


def orpo_loss(options: GivenOptions) -> dict[str, Any]:
    """Return the options for the loss of TRL's ORPO trainer."""
    options.note("the supervised loss is over the preferred answer here, over its prompt too in TRL's ORPOTrainer")
    loss = {"class_path": f"{_PREFERENCE}.ORPOLoss", "init_args": {"beta": float(options.carry("beta"))}}
    return {"loss": loss, "sft_coef": 1.0}


def cpo_loss(options: GivenOptions) -> dict[str, Any]:
    """Return the options for the loss of TRL's CPO trainer, which is SimPO's without its margin and its mean."""
    kind = options.carry("loss_type", "sigmoid")
    if kind not in ("sigmoid", "simpo"):
        options.leave("loss_type", "without a reference, sigmoid and simpo are here")
    margin = float(options.carry("simpo_gamma")) if kind == "simpo" else 0.0
    arguments = {"beta": float(options.carry("beta")), "margin": margin, "length_normalized": kind == "simpo"}
    loss = {"class_path": f"{_PREFERENCE}.SimPOLoss", "init_args": arguments}
    return {"loss": loss, "sft_coef": float(options.carry("cpo_alpha"))}


# Losses of trainers with preferences.
PAIRED = {"dpo": dpo_loss, "kto": kto_loss, "orpo": orpo_loss, "cpo": cpo_loss}
