"""docs/scaling.md is the output of the code."""

import re
from pathlib import Path

from lightning_rlhf.planning import document
from lightning_rlhf.planning.plan import GIB, plan

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "7B": 7.6e9,
    "32B": 32.8e9,
    "70B": 70.6e9,
    "MoE, 30B with 3B active": 30.5e9,
    "MoE, 8x7B with 2 active": 46.7e9,
}


def test_the_document_is_what_the_module_prints():
    printed = document.table()
    assert (ROOT / "docs/scaling.md").read_text() == printed
    prose = [line for line in printed.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 120


def test_the_models_are_as_large_as_they_are_called():
    assert document.MODELS.keys() == SIZES.keys()
    for name, size in SIZES.items():
        assert abs(document._model(name, False, 1).elements / size - 1) < 0.01


def test_a_cell_is_a_plan():
    """GRPO of the 7B model with ZeRO-3 on 64 GPUs, looked up in the file."""
    text = (ROOT / "docs/scaling.md").read_text()
    section = text.partition("### 7B")[2].partition("### 32B")[0].partition("| GRPO")[2]
    (row,) = re.findall(r"^\| `rlhf_deepspeed_stage_3` \| (.*) \|$", section, re.MULTILINE)
    cell = row.split(" | ")[document.GPUS.index(64)]
    found = plan(document.run_of("7B", "GRPO", document.STRATEGIES["`rlhf_deepspeed_stage_3`"]), 64)
    assert cell == (f"**{found.total / GIB:.0f}**" if found.fits else f"{found.total / GIB:.0f}")
