"""The Trainer of a run of TRL: duration, strategy, validation, loggers and callbacks."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.extras.migration.parts import PARTS, trl_loggers
from lightning_rlhf.extras.migration.trl_options import TRLOptions
from lightning_rlhf.extras.migration.trl_rollout import rollout

_STRATEGIES = {
    "single": "lightning_rlhf.strategies.single.RLHFSingleDeviceStrategy",
    "ddp": "lightning_rlhf.strategies.ddp.RLHFDDPStrategy",
    "fsdp": "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy",
}


def trainer_section(options: TRLOptions) -> dict[str, Any]:
    """Return the options of the Trainer."""
    run: dict[str, Any] = {**_duration(options), **_strategy(options)}
    if options.carry("bf16"):
        run["precision"] = "bf16-mixed"
    directory = options.carry("output_dir", f"runs/{options.trainer}")
    run |= {**_loggers(options, directory), **_interval(options)}
    callbacks: dict[str, Any] = {}
    if options.is_online:
        callbacks["RolloutLoop"] = rollout(options)
    callbacks["RunCheckpoint"] = _every(options, "save")
    if keep := options.carry("save_total_limit"):
        callbacks["RunCheckpoint"]["keep_last"] = int(keep)
    if lines := _every(options, "logging"):
        callbacks["Console"] = lines
    run["callbacks"] = [
        {"class_path": f"lightning_rlhf.callbacks.{name}", "init_args": arguments}
        for name, arguments in callbacks.items()
    ]
    run["callbacks"] += _following(options)
    return {**run, "default_root_dir": directory}


def _following(options: TRLOptions) -> list[dict[str, Any]]:
    """Return the callback that moves the reference, or none."""
    names = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    if not options.carry("sync_ref_model"):
        for name in filter(options.is_set, names):
            options.leave(name, "TRL reads it only with sync_ref_model")
        return []
    steps, mix = map(options.carry, names)
    arguments = {"every_n_steps": options.steps(int(steps)), "mix": float(mix)}
    return [{"class_path": PARTS["following"][0], "init_args": arguments}]


def _duration(options: TRLOptions) -> dict[str, Any]:
    if (steps := int(options.carry("max_steps"))) > 0:
        options.settle("num_train_epochs")
        return {"max_steps": options.steps(steps)}
    epochs = float(options.carry("num_train_epochs"))
    whole = max(1, round(epochs))
    if not epochs.is_integer():
        options.leave("num_train_epochs", f"max_epochs is {whole}: set max_steps for a part")
    return {"max_epochs": whole}


def _strategy(options: TRLOptions) -> dict[str, Any]:
    name = "single"
    if options.devices > 1:
        name = "fsdp" if _has_fsdp(options) else "ddp"
    strategy: Any = f"rlhf_{name}"
    if options.carry("gradient_checkpointing"):
        strategy = {"class_path": _STRATEGIES[name], "init_args": {"activation_checkpointing": True}}
    if options.devices > 1:
        return {"devices": options.devices, "strategy": strategy}
    return {"strategy": strategy} if isinstance(strategy, dict) else {}


def _has_fsdp(options: TRLOptions) -> bool:
    """Return whether the weights are sharded; the words of the option that are not here are listed."""
    words = options.carry("fsdp")
    listed = words.split() if isinstance(words, str) else words if isinstance(words, list) else []
    further = [word for word in listed if word not in ("full_shard", "auto_wrap")]
    if further:
        options.leave("fsdp", f"without {', '.join(further)}: see the options of RLHFFSDPStrategy")
    return bool(words)


def _interval(options: TRLOptions) -> dict[str, Any]:
    """Return the steps between two validations; that of each epoch is the default."""
    strategy = options.eval_strategy()
    if strategy == "no":
        return {}
    if strategy == "epoch":
        options.settle("eval_steps")
        return {}
    if strategy != "steps":
        name = "evaluation_strategy" if options.carry("eval_strategy") == "no" else "eval_strategy"
        options.leave(name, "no, steps and epoch are TRL's: each epoch is validated here")
        return {}
    every = float(options.carry("eval_steps") or options.carry("logging_steps"))  # the latter is TRL's default
    if every >= 1:
        return {"val_check_interval": options.steps(int(every))}
    options.note(f"eval_steps: {every}: a fraction of the run in TRL, of an epoch here")
    return {"val_check_interval": every}


def _every(options: TRLOptions, what: str) -> dict[str, int]:
    """Return the steps between two saves, or two lines; empty, and listed, if TRL does not count steps."""
    if options.carry(f"{what}_strategy") != "steps":
        options.leave(f"{what}_strategy")
        options.settle(f"{what}_steps")  # TRL does not read it
        return {}
    every = float(options.carry(f"{what}_steps"))
    if every >= 1:
        return {"every_n_steps": options.steps(int(every))}
    options.leave(f"{what}_steps", "a fraction of the run: set every_n_steps")
    return {}


def _loggers(options: TRLOptions, directory: str) -> dict[str, Any]:
    """Return the loggers; TensorBoard is named only beside others, because each run has it by default."""
    known, names = trl_loggers(), options.carry("report_to")
    if unknown := [str(name) for name in names if name not in (*known, "none")]:
        options.leave("report_to", f"without {', '.join(unknown)}: set logger to one of Lightning's")
    loggers = []
    for name in filter(known.__contains__, names):
        arguments = {"save_dir": directory} if name == "tensorboard" else {}
        arguments |= known[name].get("init_args", {})
        for option, ours in known[name].get("options", {}).items():
            if options.is_set(option):
                arguments[ours] = options.carry(option)
        loggers.append({"class_path": known[name]["class_path"], "init_args": arguments})
    if not loggers or names == ["tensorboard"]:
        return {}
    return {"logger": loggers if len(loggers) > 1 else loggers[0]}
