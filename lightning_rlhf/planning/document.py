"""``docs/scaling.md`` is this, printed: ``python -m lightning_rlhf.planning.document > docs/scaling.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.planning import memory, traffic
from lightning_rlhf.planning.architecture import Architecture, architecture
from lightning_rlhf.planning.plan import GIB, Plan, Run, plan
from lightning_rlhf.planning.setup import Engine, Role, Strategy, Work, strategy

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
CAPACITY = 80 * GIB
WORK = Work(responses=1024, minibatch_size=512, update_epochs=1, longest=4096, micro_batch_tokens=4096)
ENGINE = Engine(share=0.3, tensor_parallel_size=8, dtype="bfloat16")
_LESS = {"checkpointing": True}
STRATEGIES = {
    "`rlhf_ddp`": strategy("rlhf_ddp", **_LESS),
    "`rlhf_deepspeed_stage_1`": strategy("rlhf_deepspeed_stage_1", **_LESS),
    "`rlhf_deepspeed_stage_2`": strategy("rlhf_deepspeed_stage_2", **_LESS),
    "`rlhf_deepspeed_stage_3`": strategy("rlhf_deepspeed_stage_3", **_LESS),
    "`rlhf_deepspeed_stage_3_offload`": strategy("rlhf_deepspeed_stage_3_offload", **_LESS),
    "`rlhf_fsdp`": strategy("rlhf_fsdp", **_LESS),
    "`rlhf_fsdp`, 8 split tensors": strategy("rlhf_fsdp", tensor_parallel_size=8, **_LESS),
}
_ALGORITHMS = {
    "PPO": {"actor": True, "critic": True, "ref": False, "reward_model": False},
    "GRPO": {"actor": True, "ref": False},
}


@cache
def _model(name: str, scalar: bool, split: int) -> Architecture:
    return architecture(MODELS[name].hf_config(), scalar, split)


def run_of(name: str, algorithm: str, chosen: Strategy) -> Run:
    """A run of the tables: all roles of one size, as the document says.

    Raises:
        ValueError: the model's tensors are not split.
    """
    roles = [
        Role(role, _model(name, role in ("critic", "reward_model"), chosen.tensor_parallel_size), trained)
        for role, trained in _ALGORITHMS[algorithm].items()
    ]
    return Run(roles, chosen, WORK, ENGINE, CAPACITY)


def _rows(name: str, algorithm: str, gpus: Iterable[int]) -> dict[str, list[Plan]]:
    """Plans of every strategy that a model can use; 7 heads do not go into 8 parts, and experts are not split."""
    found = {}
    for label, chosen in STRATEGIES.items():
        try:
            run = run_of(name, algorithm, chosen)
        except ValueError:
            continue
        found[label] = [plan(run, number) for number in gpus]
    return found


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _memory_tables() -> list[str]:
    lines = []
    for name in MODELS:
        lines += [f"### {name}: {_model(name, False, 1).elements / 1e9:.2f} billion parameters", ""]
        for algorithm in _ALGORITHMS:
            lines += [_cells((f"{algorithm}, GPUs", *map(str, GPUS))), _cells(("---", *["--:"] * len(GPUS)))]
            for label, plans in _rows(name, algorithm, GPUS).items():
                sizes = [f"{found.total / GIB:.0f}" for found in plans]
                marked = [f"**{size}**" if found.fits else size for size, found in zip(sizes, plans, strict=True)]
                lines.append(_cells((label, *marked)))
            lines.append("")
    return lines


def _terms(columns: dict[str, Counter[str]], terms: Iterable[str]) -> list[str]:
    lines = [_cells(("GiB", *columns)), _cells(("---", *["--:"] * len(columns)))]
    for term in terms:
        if any(column[term] for column in columns.values()):
            lines.append(_cells((term, *(f"{column[term] / GIB:.1f}" for column in columns.values()))))
    total = (f"**{column.total() / GIB:.1f}**" for column in columns.values())
    return [*lines, _cells(("**all**", *total)), ""]


def _term_tables() -> list[str]:
    chosen = STRATEGIES["`rlhf_fsdp`"]
    by_model = {name: plan(run_of(name, "PPO", chosen), 64) for name in MODELS}
    lines = ["## By term: PPO with `rlhf_fsdp` on 64 GPUs", "", "Memory of one GPU:", ""]
    lines += _terms({name: found.memory for name, found in by_model.items()}, memory.TERMS)
    lines += ["Sent by one GPU in a step:", ""]
    lines += _terms({name: found.traffic for name, found in by_model.items()}, traffic.TERMS)
    return lines


def _traffic_tables() -> list[str]:
    lines = ["## Communication: GiB that one GPU sends in a step of PPO", ""]
    for name in MODELS:
        lines += [_cells((f"{name}, GPUs", *map(str, GPUS))), _cells(("---", *["--:"] * len(GPUS)))]
        for label, plans in _rows(name, "PPO", GPUS).items():
            if "offload" not in label:
                lines.append(_cells((label, *(f"{found.traffic.total() / GIB:.0f}" for found in plans))))
        lines.append("")
    return lines


_TEXTS = f"{WORK.responses:,} texts a step of up to {WORK.longest:,} tokens, mini-batches of {WORK.minibatch_size}"
_PASSES = f"micro-batches of {WORK.micro_batch_tokens:,} tokens"
_SHARE = f"{ENGINE.share * CAPACITY / GIB:.0f} GiB"
_INTRODUCTION = f"""# Scaling: what a run takes

<!-- python -m lightning_rlhf.planning.document > docs/scaling.md -->

```bash
lightning-rlhf plan --config x.yaml --gpus 64
```

prints these numbers for your own configuration, the one that you train with; any of its values can be changed on the
command line. `--gpu-memory-gib` (80) and `--nodes` say what the machines are. It loads no weights and needs no GPU.
Where the run cannot fit it ends with 2 and a sentence: the largest term, and the smallest number of GPUs that would do.

This is arithmetic, not a measurement on a GPU: none of it was compared with one. What was compared, by tests, and how
well it agrees:

| number | compared with | agreement |
|---|---|---|
| parameters | the real model, dense and mixtures of experts | exact |
| shares under `rlhf_fsdp` | what the strategy stores, 8 and 64 ranks, tensors split or not | exact |
| shares under ZeRO-1, 2, 3 | what DeepSpeed stores on 8 ranks | exact |
| optimizer state | a step of `torch.optim.AdamW` | exact; its temporary copy within 2 % |
| activations of a layer | what autograd saves: float32, bfloat16, autocast | exact; experts, Gemma 2: 1 % |
| pairs and other rows of preferences | what autograd saves, forward passes | exact |
| peak of a pass, one GPU | torch's memory tracker on a CPU | plan 5 % below to 15 % above |
| peak of a pass, `rlhf_fsdp` | torch's memory tracker, 8 ranks | within 10 % |
| bytes gathered and summed by `rlhf_fsdp`, by split tensors, by DDP | what is handed to the collectives | exact |

Ranks that a process group only claims to have (torch's fake one) stand for the others. ZeRO's communication follows the
paper and is not compared. What a GPU adds is not here: fragmentation, workspace of kernels, an attention kernel that
keeps the square of the length (torch has no other for some float32 shapes), what vLLM takes beside weights and cache.
{memory._RUNTIME_BYTES // GIB} GiB are set aside for the CUDA context and NCCL; that is a guess.

## Formulas

P parameters, T of them trained (all, or a LoRA adapter's r (in + out) for each matrix); N ranks with different data. In
bytes of one GPU, with `precision: bf16-mixed` and float32 sources:

| | parameters | gradients | optimizer state |
|---|---|---|---|
| `rlhf_single`, `rlhf_ddp` | 4 P | 4 T | 8 T |
| `rlhf_deepspeed_stage_1` | 2 P | 6 T | 12 T/N |
| `rlhf_deepspeed_stage_2` | 2 P | 4 T/N | 12 T/N |
| `rlhf_deepspeed_stage_3` | 2 P/N | 4 T/N | 12 T/N |
| `rlhf_fsdp` | 4 P/N | 4 T/N, see below | 8 T/N |

- "/N" is each library's own rule. FSDP2 cuts a parameter along its first dimension, ceil(d / N) of it to a rank, or
  where fewer than N experts are stored as one tensor, along the next that N divides. ZeRO-3 cuts flat. Tensor
  parallelism divides what it splits: attention and MLP, not embedding and head.
- Where an update of `rlhf_fsdp` has several micro-batches and `reduce_every_micro_batch` is off, each rank also holds
  all gradients until they are summed, 4 T.
- Roles take turns: activations, gathered layers and logits are those of the largest role at its fullest moment, and so
  are gradients where they are freed after an update (not DDP's buckets, ZeRO-1's and ZeRO-3's buffers).
- Gathered: FSDP2 holds embedding, head and two layers, and gradients of what is not yet summed; ZeRO-3 up to 1.05e9
  numbers, and ZeRO a bucket of up to 5e8 gradients (DeepSpeed's defaults; a strategy's own
  `config` wins).
- A layer keeps for each token n (4 h + 2 c h + 4) + c (2 a + 2 k) + 4 heads + 4 c f bytes: n norms over the width h,
  heads of a together, keys of k, an MLP of f, c bytes of a number. Experts: c active (2 h + 4 f). Latent attention
  (DeepSeek-V3): c (2 a + v + 2 o) + 4 heads, and (4 + 2 c) l + 4 for each latent of l, v being its keys' and values'
  width before positions, o its output's. Attention that is written out (Gemma 2, whose logits are capped): 4 c a, and
  (4 + 2 c) heads for each token of the text. With checkpointing c h, and one layer whole.
- A text is a row; of preferences two, padded to the longer one. KTO asks actor and reference once more.
- Logits: at most 1,024 tokens at a time, 24 bytes for each token and each of the vocabulary.
- The engine's weights are those of the actor divided by its own tensor-parallel size; the cache fills the rest of its
  share, 2 c layers k bytes a token; of latent attention what keys and values are made from, on each of its GPUs.
- Sent, on a ring: x (N - 1) / N for an all-gather or a reduce-scatter of x bytes, twice that for an all-reduce. FSDP2
  and ZeRO-3 gather each role for each forward and each backward pass, so fewer and larger micro-batches send less.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3, 5
and 7; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 1 and 2,
sections 4.2 and 5; Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3;
Patarasuk and Yuan 2009 for the ring; Hu et al. 2021 for LoRA. The functions of `lightning_rlhf/planning/` say which.

## Memory: GiB of one GPU, bold where {CAPACITY // GIB} GiB are enough

{_TEXTS},
{_PASSES}; `bf16-mixed`, float32 sources. PPO has an actor and a critic to train, a reference
and a reward model; GRPO an actor and a reference; all of one size. The engine takes {_SHARE} of each GPU for bfloat16
weights and cache, and spans {ENGINE.tensor_parallel_size} GPUs. All with `activation_checkpointing`.
Host memory is not in the table. Where the last row is missing, the model cannot be split in eight: heads or experts are
in the way.
"""


def table() -> str:
    """The document."""
    lines = [_INTRODUCTION, *_memory_tables(), *_term_tables(), *_traffic_tables()]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(table(), end="")
