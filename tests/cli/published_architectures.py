"""The ``config.json`` of the models in the recipes, as published by their authors, so that tests need no download.

``parameters`` is the published number in billions; ``small`` has the changes for a copy with two tiny layers.
"""

_QWEN = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_TINY = {  # vLLM's attention on CPUs takes heads of 32, its experts multiples of 32
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def _qwen(kind, hidden, layers, heads, keys, inner, vocabulary, **further):
    widths = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    inside = {"num_key_value_heads": keys, "intermediate_size": inner, "vocab_size": vocabulary}
    return {"model_type": kind, **widths, **inside, **_QWEN, **further}


_VISION_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
QWEN25_VL_7B = {
    "model_type": "qwen2_5_vl",
    **_VISION_TOKENS,
    "tie_word_embeddings": False,
    "text_config": {
        **{k: v for k, v in _qwen("qwen2", 3584, 28, 28, 4, 18944, 152064).items() if k != "model_type"},
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
QWEN3_VL_4B = {
    "model_type": "qwen3_vl",
    **_VISION_TOKENS,
    "tie_word_embeddings": True,
    "text_config": {
        **{k: v for k, v in _qwen("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128).items() if k != "model_type"},
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
DEEPSEEK_7B = {
    "model_type": "llama",
    "vocab_size": 102400,
    "hidden_size": 4096,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
}
QWEN2_7B = _qwen("qwen2", 3584, 28, 28, 4, 18944, 152064)
QWEN25_32B = _qwen("qwen2", 5120, 64, 40, 8, 27648, 152064)
GEMMA2_2B = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
MOONLIGHT = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "max_position_embeddings": 8192,
    "rope_theta": 50000.0,
}
QWEN15_MOE = _qwen(
    "qwen2_moe", 2048, 24, 16, 16, 5632, 151936,
    moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
)  # fmt: skip
QWEN3_MOE = _qwen(
    "qwen3_moe", 2048, 48, 32, 4, 6144, 151936,
    head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip

# path: architecture, billions of parameters
PUBLISHED = {
    "deepseek-ai/deepseek-llm-7b-chat": (DEEPSEEK_7B, 6.91),
    "Qwen/Qwen2.5-0.5B-Instruct": (_qwen("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 0.494),
    "Qwen/Qwen2.5-1.5B-Instruct": (_qwen("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True), 1.54),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN2_7B, 7.62),
    "Qwen/Qwen2.5-14B-Instruct": (_qwen("qwen2", 5120, 48, 40, 8, 13824, 152064), 14.77),
    "Qwen/Qwen2.5-3B-Instruct": (_qwen("qwen2", 2048, 36, 16, 2, 11008, 151936, tie_word_embeddings=True), 3.09),
    "Qwen/Qwen2-7B-Instruct": (QWEN2_7B, 7.62),
    "Qwen/Qwen2.5-32B-Instruct": (QWEN25_32B, 32.8),
    "Qwen/Qwen2.5-32B": (QWEN25_32B, 32.8),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": (QWEN15_MOE, 14.3),
    "Qwen/Qwen3-8B": (_qwen("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8.19),
    "Qwen/Qwen3-30B-A3B": (QWEN3_MOE, 30.5),
    "google/gemma-2-2b-it": (GEMMA2_2B, 2.61),
    "Qwen/Qwen2.5-VL-7B-Instruct": (QWEN25_VL_7B, 8.29),
    "Qwen/Qwen3-VL-4B-Instruct": (QWEN3_VL_4B, 4.44),
    "moonshotai/Moonlight-16B-A3B-Instruct": (MOONLIGHT, 16.0),
}
SMALL = {
    "llama": _TINY,
    "qwen2": {k: v for k, v in _TINY.items() if k != "head_dim"},
    "qwen3": _TINY,
    "qwen2_moe": {k: v for k, v in (_TINY | _EXPERTS).items() if k != "head_dim"}
    | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": _TINY | _EXPERTS,
    "gemma2": _TINY | {"sliding_window": 8, "query_pre_attn_scalar": 32},
    "deepseek_v3": {
        **{k: v for k, v in _TINY.items() if k != "head_dim"},
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,  # and the latent widths as published: vLLM on CPUs takes no others
    },
}


def with_text(architecture, **fields):
    """Return an architecture with other fields of its text model."""
    if "text_config" not in architecture:
        return architecture | fields
    return architecture | {"text_config": architecture["text_config"] | fields}


def width_of(architecture):
    """Return the width of the residual stream."""
    return architecture.get("text_config", architecture)["hidden_size"]
