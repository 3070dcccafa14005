"""The responses of a run of TRL: how they are generated, by which engine, and their rewards."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.parts import vllm_engine
from lightning_rlhf.extras.migration.trl_options import TRLOptions

_TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # take lists of messages


def rollout(options: TRLOptions) -> dict[str, Any]:
    """Return the options of the RolloutLoop."""
    found: dict[str, Any] = {
        "group_size": int(options.carry("num_generations")),
        "max_response_tokens": int(options.carry("max_completion_length")),
        "temperature": float(options.carry("temperature")),
    }
    if "max_completion_length" in options.nulls:
        options.note("max_completion_length: null has no limit in TRL; max_response_tokens is 512 here")
    limits = {"top_p": options.carry("top_p"), "top_k": options.carry("top_k"), "min_p": options.carry("min_p")}
    unlimited = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
    found |= {name: value for name, value in limits.items() if value is not None and value not in unlimited[name]}
    if samples := options.carry("num_generations_eval"):
        found["val_samples"] = int(samples)
    if (rewards := _rewards(options)) is not None:
        found["rewards"] = rewards
    if engine := _engine(options):
        found["engine"] = engine
    return found


def _rewards(options: TRLOptions) -> list[dict[str, Any]] | None:
    """Return the reward functions; None if only the module's reward model scores."""
    functions = [str(name) for name in options.carry("reward_funcs", [])]
    has_model = bool(options.carry("reward_model_name_or_path"))
    if not functions and has_model:
        return None
    if not functions:
        options.note("reward_funcs: functions are passed in Python; write them to reward.py, by their names")
        return [{"function": "reward.py:reward"}]
    number = len(functions) + has_model
    weights = [float(weight) for weight in options.carry("reward_weights", [1.0] * number)]
    if len(weights) != number:
        model = " and the reward model" if has_model else ""
        raise UsageError(f"reward_weights has {len(weights)} numbers for {len(functions)} reward_funcs{model}")
    if has_model:
        of_model = weights.pop(0)  # TRL's command puts the reward model first
        if of_model != 1.0:
            reason = "the weight of the reward model is 1 here: divide the others by it"
            options.leave("reward_weights", reason)
    pairs = zip(functions, weights, strict=True)
    return [{**_reward(options, function), "weight": weight} for function, weight in pairs]


def _reward(options: TRLOptions, function: str) -> dict[str, Any]:
    if function == "get_soft_overlong_punishment":  # with the arguments of TRL's command
        arguments = {"max_tokens": 1280, "buffer_tokens": 256}
        return {"function": {"class_path": "lightning_rlhf.rewards.shaping.OverlongPenalty", "init_args": arguments}}
    function = function.removeprefix("trl.rewards.")
    if function in _TRL_REWARDS:
        options.note(f"reward_funcs: {function} is one of TRL's own, which must be installed: pip install trl")
        return {"function": f"trl.rewards.{function}", "messages": True}
    return {"function": function if "." in function else f"reward.py:{function}"}


def _engine(options: TRLOptions) -> dict[str, Any] | None:
    """Return vLLM, or the connection to its server; None lets the machine decide."""
    if not options.carry("use_vllm"):
        for name in options.given:
            if name.startswith("vllm_"):
                options.leave(name, "TRL reads it with use_vllm only")
        return None
    if options.carry("vllm_mode") == "server":
        options.leave("vllm_mode", "start the server with the command of docs/rollouts.md, not with TRL's")
        return _server(options)
    engine: dict[str, Any] = {"gpu_memory_utilization": float(options.carry("vllm_gpu_memory_utilization"))}
    if (ranks := int(options.carry("vllm_tensor_parallel_size"))) > 1:
        engine["tensor_parallel_size"] = ranks
    if options.carry("vllm_enable_sleep_mode"):
        engine["sleep_while_learning"] = True
    return vllm_engine(engine)


def _server(options: TRLOptions) -> dict[str, Any]:
    """Return the connection to a server of vLLM."""
    host, port = options.carry("vllm_server_host"), options.carry("vllm_server_port")
    host = "127.0.0.1" if host == "0.0.0.0" else host  # all addresses of this machine
    server: dict[str, Any] = {"urls": options.carry("vllm_server_base_url", f"http://{host}:{port}")}
    if options.is_set("vllm_server_timeout"):
        server["timeout"] = float(options.carry("vllm_server_timeout"))
    return {"class_path": "lightning_rlhf.extras.servers.engine.VLLMServerEngine", "init_args": server}
