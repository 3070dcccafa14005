"""Memory that a run needs on one GPU, by size of the model, algorithm and way of training."""

from __future__ import annotations

from functools import cache

from lightning_rlhf.extras.plan.architecture import Architecture, architecture
from lightning_rlhf.extras.plan.memory import CACHE, ENGINE, ENGINE_PASS, cache_bytes, engine_bytes
from lightning_rlhf.extras.plan.plan import GIB, plan
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Work, strategy
from lightning_rlhf.models.loading import FromConfig

_WIDTHS = {  # of Qwen2.5: hidden, layers, heads, key heads, MLP, vocabulary
    "0.5 B": (896, 24, 14, 2, 4864, 151936),
    "1.5 B": (1536, 28, 12, 2, 8960, 151936),
    "3 B": (2048, 36, 16, 2, 11008, 151936),
    "7 B": (3584, 28, 28, 4, 18944, 152064),
    "14 B": (5120, 48, 40, 8, 13824, 152064),
}
_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
_COMMON = {"model_type": "qwen2", "max_position_embeddings": 32768}
MODELS = {
    name: FromConfig({**_COMMON, **dict(zip(_FIELDS, widths, strict=True)), "tie_word_embeddings": widths[0] <= 2048})
    for name, widths in _WIDTHS.items()
}
ALGORITHMS = {"GRPO": ("actor",), "PPO": ("actor", "critic", "reward_model")}
METHODS = ("all weights", "LoRA", "LoRA on one base", "nf4 on one base")
_RANK = 32
_TEXTS = 32  # whose keys and values the engine's cache holds at least
WORK = Work(
    responses=128,
    minibatch_size=128,
    update_epochs=1,
    longest=1536,
    micro_batch_tokens=8192,
    reuses_first=True,
    response_tokens=1024,
)


def roles_of(model: str, algorithm: str, method: str) -> list[Role]:
    """Return the models of a run with ``bf16-mixed``; all have the same size.

    With LoRA, the reference is the actor without its adapters. On one base, critic and reward model are adapters and
    heads.

    Args:
        model: key of ``MODELS``.
        algorithm: key of ``ALGORITHMS``.
        method: one of ``METHODS``.
    """
    if method == "all weights":
        trained = [Role(name, _shapes(model, name != "actor"), trained=True) for name in ALGORITHMS[algorithm][:2]]
        frozen = ["ref", *ALGORITHMS[algorithm][2:]]
        return [*trained, *(Role(name, _shapes(model, name != "ref"), False, "bfloat16") for name in frozen)]
    shares, quantization = method.endswith("one base"), "nf4" if method.startswith("nf4") else None
    roles = []
    for name in ALGORITHMS[algorithm]:
        trained_role = name != "reward_model"
        roles.append(
            Role(
                name,
                _shapes(model, name != "actor"),
                trained_role,
                dtype="bfloat16",
                lora_rank=_RANK if trained_role or shares else 0,
                is_reference_too=name == "actor",
                quantization=quantization,
                shares_base=shares and name != "actor",
            )
        )
    return roles


@cache
def needed(model: str, algorithm: str, method: str, capacity_gib: int) -> float:
    """Return the GiB of a run of ``WORK`` on one GPU, with an engine on it that holds keys and values of 32 texts.

    Args:
        model: key of ``MODELS``.
        algorithm: key of ``ALGORITHMS``.
        method: one of ``METHODS``.
        capacity_gib: memory of the GPU, on which the engine's largest pass depends.
    """
    roles, capacity = roles_of(model, algorithm, method), capacity_gib * GIB
    chosen = strategy("rlhf_single", checkpointing=True)
    # With a share, the plan counts the largest pass; so small a one reserves no more than a text of cache.
    engine = Engine(share=1e-6, sequences=1, dtype="bfloat16")
    run = Run(roles, chosen, WORK, engine, capacity)
    planned = plan(run, 1)
    reserved = engine_bytes(engine, run.actor, WORK, capacity)
    texts = _TEXTS * WORK.longest * cache_bytes(engine, run.actor)
    training = planned.total - sum(reserved[term] for term in (ENGINE, ENGINE_PASS, CACHE))
    return (training + reserved[ENGINE] + reserved[ENGINE_PASS] + texts) / GIB


@cache
def _shapes(model: str, scalar: bool) -> Architecture:
    return architecture(MODELS[model].hf_config(), scalar)


def table(capacity_gib: int) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of GiB; runs that do not fit are in brackets.

    Args:
        capacity_gib: memory of the GPU.
    """
    runs = [(algorithm, method) for algorithm in ALGORITHMS for method in METHODS if _differs(algorithm, method)]
    headings = ["model", *(f"{algorithm}, {method}" for algorithm, method in runs)]
    rows = []
    for model in MODELS:
        sizes = [needed(model, algorithm, method, capacity_gib) for algorithm, method in runs]
        rows.append([model, *(f"{size:.1f}" if size <= capacity_gib else f"({size:.1f})" for size in sizes)])
    return headings, rows


def _differs(algorithm: str, method: str) -> bool:
    """Return whether a method is another one for an algorithm: GRPO has one model with adapters anyway."""
    return algorithm != "GRPO" or method != "LoRA on one base"
