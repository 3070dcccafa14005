"""Tables of ``docs/scaling_tables.md``; ``python -m benchmarks.scaling_tables`` with its path rewrites them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lightning_rlhf.extras.plan import memory, one_gpu, traffic
from lightning_rlhf.extras.plan.architecture import Architecture, architecture
from lightning_rlhf.extras.plan.plan import GIB, Plan, plan
from lightning_rlhf.extras.plan.setup import Engine, Role, Run, Strategy, Work, strategy
from lightning_rlhf.models.loading import FromConfig

_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
MODELS = {
    "7B": FromConfig(
        {
            **_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4,
        }
    ),
    "32B": FromConfig(
        {
            **_QWEN2, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8,
        }
    ),
    "70B": FromConfig(
        {
            "model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False, "hidden_size": 8192,
            "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        }
    ),
    "MoE, 30B with 3B active": FromConfig(
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "tie_word_embeddings": False, "hidden_size": 2048,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8,
        }
    ),
    "MoE, 8x7B with 2 active": FromConfig(
        {
            "model_type": "mixtral", "vocab_size": 32000, "tie_word_embeddings": False, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        }
    ),
}  # fmt: skip
GPUS = (8, 16, 32, 64, 128, 256, 512)
STRATEGIES = {
    **{
        f"`{name}`": strategy(name, checkpointing=True)
        for name in (
            "rlhf_ddp",
            "rlhf_deepspeed_stage_1",
            "rlhf_deepspeed_stage_2",
            "rlhf_deepspeed_stage_3",
            "rlhf_deepspeed_stage_3_offload",
            "rlhf_fsdp",
        )
    },
    "`rlhf_fsdp`, tensor parallel 8": strategy("rlhf_fsdp", tensor_parallel_size=8, checkpointing=True),
}
# Roles of an algorithm, and whether they are trained.
_ALGORITHMS = {
    "PPO": {"actor": True, "critic": True, "ref": False, "reward_model": False},
    "GRPO": {"actor": True, "ref": False},
}


@cache
def model_shapes(name: str, scalar: bool = False, split: int = 1) -> Architecture:
    """Return the shapes of a model of the tables.

    Args:
        name: key of ``MODELS``.
        scalar: whether the model has a head with one output.
        split: tensor-parallel size.

    Raises:
        ValueError: the model's tensors cannot be split.
    """
    return architecture(MODELS[name].hf_config(), scalar, split)


def run_of(name: str, algorithm: str, strategy: Strategy) -> Run:
    """Return the run of a table row; all roles have the same size.

    Args:
        name: key of ``MODELS``.
        algorithm: PPO or GRPO.
        strategy: value of ``STRATEGIES``.

    Raises:
        ValueError: the model's tensors cannot be split.
    """
    roles = []
    for role, trained in _ALGORITHMS[algorithm].items():
        scalar = role in ("critic", "reward_model")
        roles.append(Role(role, model_shapes(name, scalar, strategy.tensor_parallel_size), trained))
    work = Work(responses=1024, minibatch_size=512, update_epochs=1, longest=4096, micro_batch_tokens=4096)
    engine = Engine(share=0.3, tensor_parallel_size=8, dtype="bfloat16")
    return Run(roles, strategy, work, engine, capacity=80 * GIB)


def with_tables(page: str) -> str:
    """Return a page with current tables between its markers ``<!-- table: name -->`` and ``<!-- end -->``.

    Raises:
        ValueError: a marker is missing or occurs twice.
    """
    tables = {
        "memory": _memory_tables,
        "memory by term": _memory_terms,
        "communication by term": _traffic_terms,
        "communication": _traffic_tables,
        "one GPU": _one_gpu_tables,
    }
    blocks = {name: rf"(<!-- table: {name} -->\n).*?(<!-- end -->)" for name in tables}
    for name, block in blocks.items():
        if (count := len(re.findall(block, page, re.DOTALL))) != 1:
            raise ValueError(f"the page must contain <!-- table: {name} --> and <!-- end --> once, got {count}")
    for name, block in blocks.items():
        page = re.sub(block, rf"\1\n{tables[name]()}\n\n\2", page, flags=re.DOTALL)
    return page


@cache
def _plans(name: str, algorithm: str) -> dict[str, list[Plan]]:
    """Return plans for each number of GPUs by strategy, without those that cannot split the model's tensors."""
    plans = {}
    for label, chosen in STRATEGIES.items():
        try:
            run = run_of(name, algorithm, chosen)
        except ValueError:
            continue
        plans[label] = [plan(run, gpus) for gpus in GPUS]
    return plans


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = list(headings)
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _memory_tables() -> str:
    parts = []
    for name in MODELS:
        parts.append(f"### {name}: {model_shapes(name).elements / 1e9:.2f} billion parameters")
        for algorithm in _ALGORITHMS:
            rows = []
            for label, plans in _plans(name, algorithm).items():
                sizes = [(f"{each.total / GIB:.0f}", each.fits) for each in plans]
                rows.append([label, *(f"**{size}**" if fits else size for size, fits in sizes)])
            parts.append(_table([f"{algorithm}, GPUs", *map(str, GPUS)], rows))
    return "\n\n".join(parts)


def _term_table(columns: dict[str, Counter[str]], terms: Iterable[str]) -> str:
    rows = [
        [term, *(f"{column[term] / GIB:.1f}" for column in columns.values())]
        for term in terms
        if any(column[term] for column in columns.values())
    ]
    rows.append(["**all**", *(f"**{column.total() / GIB:.1f}**" for column in columns.values())])
    return _table(["GiB", *columns], rows)


def _memory_terms() -> str:
    plans = _plans_by_model()
    return _term_table({name: each.memory for name, each in plans.items()}, memory.TERMS)


def _traffic_terms() -> str:
    plans = _plans_by_model()
    return _term_table({name: each.traffic for name, each in plans.items()}, traffic.TERMS)


def _plans_by_model() -> dict[str, Plan]:
    return {name: plan(run_of(name, "PPO", STRATEGIES["`rlhf_fsdp`"]), 64) for name in MODELS}


def _traffic_tables() -> str:
    parts = []
    for name in MODELS:
        rows = [
            [label, *(f"{each.traffic.total() / GIB:.0f}" for each in plans)]
            for label, plans in _plans(name, "PPO").items()
            if "offload" not in label
        ]
        parts.append(_table([f"{name}, GPUs", *map(str, GPUS)], rows))
    return "\n\n".join(parts)


def _one_gpu_tables() -> str:
    parts = []
    for capacity in (24, 48, 80):
        headings, rows = one_gpu.table(capacity)
        bold = [[row[0], *(size if size.startswith("(") else f"**{size}**" for size in row[1:])] for row in rows]
        plain = [[cell.strip("()") for cell in row] for row in bold]
        parts.append(_table([f"{capacity} GiB", *headings[1:]], plain))
    return "\n\n".join(parts)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
