"""The model of a run of TRL: its source, its adapters, and its quantization."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.extras.migration.trl_options import TRLOptions

NO_MODEL = "set the model"
# Options of a model by TRL's names of today and of earlier releases; those whose values are few here.
_SOURCE = {
    "model_revision": "revision", "revision": "revision", "dtype": "dtype", "torch_dtype": "dtype",
    "attn_implementation": "attn_implementation",
}  # fmt: skip
_SOURCE_VALUES = {
    "dtype": ("float32", "bfloat16"),
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3"),
}
_LORA: dict[str, str] = {
    "rank": "lora_r", "alpha": "lora_alpha", "target_modules": "lora_target_modules", "rslora": "use_rslora",
    "dora": "use_dora",
}  # fmt: skip


def model_source(options: TRLOptions) -> Any:
    """Return the source of the trained model: its path alone, or a class with its options."""
    path = options.carry("model_name_or_path")
    if path is None:
        options.note("model_name_or_path: the file names no model; write it to run.yaml, in two places")
    source: dict[str, Any] = {"path": path or NO_MODEL}
    quantized = [name for name in ("load_in_4bit", "load_in_8bit") if options.carry(name)]
    has_adapters = bool(options.carry("use_peft") or quantized)
    if quantized and not options.carry("use_peft"):
        options.note(f"{quantized[0]}: quantized weights are frozen, so adapters are trained")
    source |= _source_options(options, has_adapters)
    if has_adapters:
        source["lora"] = _lora(options)
    if quantized:
        source["quantization"] = "nf4" if quantized[0] == "load_in_4bit" else "int8"
    if set(source) == {"path"}:
        return source["path"]
    return {"class_path": "lightning_rlhf.Pretrained", "init_args": source}


def _source_options(options: TRLOptions, has_adapters: bool) -> dict[str, Any]:
    """Return revision, dtype and attention, which a file sets by themselves or within ``model_init_kwargs``."""
    kwargs = dict(options.carry("model_init_kwargs", {}))
    found: dict[str, Any] = {}
    for name, ours in _SOURCE.items():
        value = str(kwargs.pop(name, None) or options.carry(name, "")).removeprefix("torch.")
        allowed = _SOURCE_VALUES.get(ours)
        if not value or (ours, value) == ("revision", "main") or (value == "auto" and has_adapters):
            continue
        if ours == "dtype" and value != "float32" and not has_adapters:
            precision = "bf16-mixed" if options.carry("bf16") else "float32"
            options.note(f"{name}: {value}: trained weights are float32 here, computed in {precision}")
        elif allowed and value not in allowed:
            options.note(f"{name}: {value!r} (`{ours}` of `Pretrained` is {', '.join(allowed)} or left out)")
        else:
            found[ours] = value
    if kwargs:
        options.note(f"model_init_kwargs: {kwargs!r:.80} (no options of `Pretrained`)")
    return found


def _lora(options: TRLOptions) -> dict[str, Any]:
    adapters = {ours: options.carry(theirs) for ours, theirs in _LORA.items()}
    if options.is_online:
        options.leave("lora_dropout", "importance ratios compare two passes of one network: it is 0 here")
    elif options.carry("disable_dropout", False):
        options.settle("lora_dropout")  # TRL switches it off as well
    else:
        adapters["dropout"] = options.carry("lora_dropout")
    targets = adapters["target_modules"]
    if targets is None:  # peft's default for most models
        adapters["target_modules"] = ["q_proj", "v_proj"]
    elif targets in ("all-linear", ["all-linear"]):
        del adapters["target_modules"]  # all linear layers, the default here
    elif isinstance(targets, str):
        adapters["target_modules"] = [targets]
    return {name: value for name, value in adapters.items() if value}
