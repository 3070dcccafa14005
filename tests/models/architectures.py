"""Every causal architecture of transformers in tiny form: ``python -m tests.models.architectures`` writes the list.

An architecture is built with random weights, and its log-probs and gradients are compared with those of the model's own
logits, one text at a time. The page ``docs/architectures.md`` has the results.
"""

from __future__ import annotations

import logging
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_rlhf.batching.packing import pack_responses, pack_texts
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models import packed_attention
from lightning_rlhf.models.causal import CausalLM
from lightning_rlhf.models.heads import ShortTextLogprobs, check_head
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.modules.text_layout import packing_fault
from lightning_rlhf.rollout.choose import weight_bytes

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
VOCABULARY = 41
# Sizes under the names that architectures give them; a configuration gets those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2,
    "num_layers": 2, "n_layers": 2, "decoder_layers": 2, "num_attention_heads": 2, "n_head": 2, "n_heads": 2,
    "num_heads": 2, "attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "n_inner": 48,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "init_std": 0.2, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "moe_topk": 2, "moe_k": 2, "first_k_dense_replace": 1, "num_shared_experts": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "sliding_window": 64, "embedding_size": 32, "word_embed_proj_dim": 32, "rotary_dim": 8, "lru_width": 32,
    "attention_window_size": 64, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "state_size": 8, "n_groups": 1,
    "mamba_dt_rank": 4, "time_step_rank": 4, "dim_model_base": 8, "attention_dropout": 0.0, "local_attention": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4,
    "logits_scaling": 2.0, "logit_scale": 0.5, "lm_head_multiplier": 0.5, "logits_soft_cap": 3.0,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
TOWER = {"image_size": 16, "patch_size": 4, "out_hidden_size": 32, "depth": 1, "num_position_embeddings": 16}
OPTIONS: dict[str, dict[str, Any]] = {  # sizes that must fit each other
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "zaya": {"num_experts_per_tok": 1},
    "minicpm3": {"dim_model_base": 8},
    "granitemoehybrid": {"mamba_expand": 1, "mamba_d_head": 8, "mamba_n_heads": 4},
    "bamba": {"mamba_expand": 1, "mamba_d_head": 8, "mamba_n_heads": 4},
    "mamba2": {"expand": 1, "num_heads": 4, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "llama4_text": {"intermediate_size_mlp": 48},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "xlm": {"emb_dim": 32, "causal": True, "n_words": 41},
}
LARGEST = 20_000_000  # parameters
LENGTHS = ((5, 6), (5, 2), (3, 4))  # prompt and response; the first two texts have the same prompt


class Result(NamedTuple):
    """Result of one architecture.

    Args:
        name: its ``model_type``.
        verdict: key of :data:`VERDICTS`.
        reason: reason for padding, rejection, or a missing comparison.
        error: largest difference of a log-prob from the model's own, nats.
        gradient_error: largest difference of a gradient, relative to the largest gradient.
    """

    name: str
    verdict: str
    reason: str = ""
    error: float = 0.0
    gradient_error: float = 0.0


VERDICTS = {
    "packed, prompts shared": "Your texts are packed into one row, and the prompt of a group is computed once.",
    "packed": "Your texts are packed into one row.",
    "padded": "Your texts are padded, because the model does not separate texts in one row.",
    "rejected": "Your run ends before its first step and tells you why.",
    "not compared": "We found no small form that transformers builds and runs. Your run compares them at its start.",
}


def tiny(name: str) -> dict[str, Any]:
    """Return a small architecture for a ``model_type``."""
    config = CONFIG_MAPPING[name]()
    values: dict[str, Any] = {"model_type": name, **(sizes(config) | OPTIONS.get(name, {}))}
    for part in ("text_config", "vision_config", "audio_config"):
        inner = getattr(config, part, None)
        if isinstance(inner, PretrainedConfig):
            values[part] = sizes(inner) | (TOWER if part != "text_config" else OPTIONS.get(inner.model_type, {}))
    return values


def sizes(config: PretrainedConfig) -> dict[str, Any]:
    """Return the size fields of a configuration that can be set."""
    fixed = {name for name in dir(type(config)) if isinstance(getattr(type(config), name, None), property)}
    values = {field: value for field, value in SIZES.items() if field in vars(config) and field not in fixed}
    if hasattr(config, "qk_rope_head_dim"):
        values.pop("head_dim", None)  # those of latent attention are of two parts
    kinds = vars(config).get("layer_types")
    if kinds and "layer_types" not in fixed:
        values["layer_types"] = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]
    return values


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (B, L) token ids of the texts, and the (B, L - 1) positions that predict one of their tokens."""
    draw = torch.Generator().manual_seed(0)
    width = max(map(sum, LENGTHS))
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), width), generator=draw)
    ids[1, :5] = ids[0, :5]
    lengths = torch.tensor([sum(pair) for pair in LENGTHS]).unsqueeze(1)
    return ids, torch.arange(1, width) < lengths


def compare(model: CausalLM, packing: Any) -> tuple[float, float]:
    """Return the largest differences of log-probs and gradients from those of the model's own logits."""
    ids, mask = texts()
    index = torch.arange(ids.shape[1] - 1).expand_as(mask)
    weights = torch.linspace(-1, 2, mask.numel()).view_as(mask) * mask
    ours = model(ids, index, ids[:, 1:], mask, packing=packing).logprobs
    rows = []
    for row, pair in zip(ids, LENGTHS, strict=True):
        instance = row[: sum(pair)].unsqueeze(0)
        every = model.lm(input_ids=instance, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = every.gather(1, instance[0, 1:].unsqueeze(1)).squeeze(1)
        rows.append(torch.nn.functional.pad(chosen, (0, ids.shape[1] - instance.shape[1])))
    theirs = torch.stack(rows)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    one, other = (
        torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
        for values in (ours, theirs)
    )
    largest = max(float(gradient.abs().max()) for gradient in other)
    apart = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    return float(((ours - theirs) * mask).abs().max()), apart / largest


def check_role(lm: Any, evaluate: Any) -> None:
    """Check the log-probs of a model as a run does before its first step."""
    ids, other = texts()[0][1:, :10].unsqueeze(1)
    ours, again = evaluate(ids, None), evaluate(ids, None)
    changed = evaluate(torch.cat([ids[:, :5], other[:, 5:]], dim=1), None)
    continued = torch.cat([changed[:, :5], ours[:, 5:]], dim=1)
    instance = evaluate(ids, None, own_logits=True)
    check_head(f"the actor's {type(lm).__name__}", ShortTextLogprobs(ours, again, continued, instance), is_exact=True)


def check(name: str) -> Result:
    """Build an architecture and compare it with itself."""
    try:
        source = FromConfig(tiny(name), seed=3)
        parameters = weight_bytes(source.hf_config(), "float32") // 4
        if parameters > LARGEST:
            return Result(name, "not compared", f"{parameters:,} parameters")
        return compared(name, source.causal().train())
    except Exception as error:  # the small form is wrong; the result contains the reason
        return Result(name, "not compared", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def compared(name: str, model: CausalLM) -> Result:
    """Check a model as a run does, and compare it in the layout that a run would choose."""

    def evaluate(ids: torch.Tensor, packing: Any, **options: bool) -> torch.Tensor:
        index = torch.arange(ids.shape[1]).expand_as(ids)
        marked = torch.ones_like(ids, dtype=torch.bool)
        return model(ids, index, ids, marked, packing=packing, **options).logprobs

    with torch.no_grad():
        try:
            check_role(model.lm, evaluate)
        except UsageError as error:
            return Result(name, "rejected", str(error))
        fault = packing_fault(model.lm, evaluate, True, torch.device("cpu"))
    width = max(map(sum, LENGTHS))
    if fault is not None:
        return Result(name, "padded", fault, *compare(model, None))
    if model.lm.config._attn_implementation == packed_attention.NAME:
        packing = pack_responses(*zip(*LENGTHS, strict=True), (0, 0, 1), width)
        return Result(name, "packed, prompts shared", "", *compare(model, packing))
    return Result(name, "packed", "", *compare(model, pack_texts([sum(pair) for pair in LENGTHS], width)))


def names() -> list[str]:
    """Return the ``model_type`` of every causal architecture of transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page(results: list[Result]) -> str:
    """Return the text of the page."""
    introduction = (
        f"Does your model work here? Find the `model_type` of its `config.json` in these lists of all {len(results)} "
        f"causal architectures of transformers {transformers.__version__}. We built each one in a small form with "
        f"random weights, and compared log-probs and gradients with the model's own logits. Your run repeats a part "
        f"of this before its first step. Whether vLLM can generate with an architecture is a different question. "
        f"`python -m tests.models.architectures` writes this page."
    )
    lines = ["# Supported model architectures", "", *textwrap.wrap(introduction, 118, break_on_hyphens=False), ""]
    for verdict, meaning in VERDICTS.items():
        instance = [result for result in results if result.verdict == verdict]
        text = f"{meaning} " + ", ".join(f"`{result.name}`" for result in instance) + "."
        if instance:
            lines += [
                f"## {verdict.capitalize()}: {len(instance)}",
                "",
                *textwrap.wrap(text, 118, break_on_hyphens=False),
                "",
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = []
    for chosen in sys.argv[1:] or names():
        made.append(check(chosen))
        print("{}: {}; log-probs {:.1e} nats, gradients {:.1e}; {}".format(*made[-1][:2], *made[-1][3:], made[-1][2]))
    if len(sys.argv) == 1:
        PAGE.write_text(page(made), encoding="utf-8")
