"""The tables of docs/scaling_tables.md are the output of the code."""

import re
from pathlib import Path

import pytest

from benchmarks import scaling_tables
from lightning_rlhf.extras.plan.memory import _RUNTIME_BYTES
from lightning_rlhf.extras.plan.plan import GIB, plan

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/scaling_tables.md"
SIZES = {  # published numbers of parameters
    "7B": 7.6e9,
    "32B": 32.8e9,
    "70B": 70.6e9,
    "MoE, 30B with 3B active": 30.5e9,
    "MoE, 8x7B with 2 active": 46.7e9,
}


@pytest.mark.slow
def test_page_has_the_generated_tables():
    text = PAGE.read_text()
    assert scaling_tables.with_tables(text) == text


def test_lines_of_the_page_have_at_most_120_characters():
    lines = [line for line in PAGE.read_text().splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 120


def test_page_without_a_marker_raises():
    with pytest.raises(ValueError, match="must contain <!-- table: memory --> and <!-- end --> once, got 0"):
        scaling_tables.with_tables("# Scaling")


def test_prose_has_the_settings_of_the_tables():
    run = scaling_tables.run_of("7B", "PPO", scaling_tables.STRATEGIES["`rlhf_fsdp`"])
    text = " ".join((PAGE.read_text() + PAGE.with_name("scaling.md").read_text()).split())
    work = run.work
    for part in (
        f"{work.responses:,} texts per step of up to {work.longest:,} tokens, mini-batches of {work.minibatch_size}",
        f"micro-batches of {work.micro_batch_tokens:,} tokens",
        f"bold where {run.capacity // GIB} GiB suffice",
        f"{run.engine.share * run.capacity / GIB:.0f} GiB of each GPU",
        f"spans {run.engine.tensor_parallel_size} GPUs",
        f"{_RUNTIME_BYTES // GIB} GiB for the CUDA context",
    ):
        assert part in text


def test_models_have_their_published_sizes():
    assert scaling_tables.MODELS.keys() == SIZES.keys()
    for name, size in SIZES.items():
        assert abs(scaling_tables.model_shapes(name).elements / size - 1) < 0.01


def between(start, end, text):
    """Return the part of a text between two headings."""
    return text.partition(start)[2].partition(end)[0]


def test_table_cell_equals_a_plan():
    """GRPO of the 7B model with ZeRO-3 on 64 GPUs."""
    section = between("### 7B", "### 32B", PAGE.read_text())
    tables_from_grpo = section.partition("| GRPO")[2]
    (row,) = re.findall(r"^\| `rlhf_deepspeed_stage_3` \| (.*) \|$", tables_from_grpo, re.MULTILINE)
    cell = row.split(" | ")[scaling_tables.GPUS.index(64)]
    planned = plan(scaling_tables.run_of("7B", "GRPO", scaling_tables.STRATEGIES["`rlhf_deepspeed_stage_3`"]), 64)
    assert cell == (f"**{planned.total / GIB:.0f}**" if planned.fits else f"{planned.total / GIB:.0f}")
