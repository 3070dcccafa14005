"""Parts of the benchmark against other libraries that run quickly and need no other library."""

import json
import re
import subprocess
import sys
from datetime import date
from types import SimpleNamespace

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare import floor, task
from benchmarks.compare.__main__ import MKL
from benchmarks.compare.meter import WARM, Meter


def test_answers_are_correct_and_have_the_requested_number_of_steps():
    for row in task.problems(200, seed=3):
        words = row["prompt"].rstrip(":").split()
        numbers = [int(word) for word in words if word.isdigit()]
        value, addend, steps = numbers
        lines = row["answer"].split(" ")
        assert len(lines) == steps
        for left, line in zip(range(steps, 0, -1), lines, strict=True):
            assert line == f"{left:02d}:{value}+{addend}={(value + addend) % 10}"
            value = (value + addend) % 10
        assert len(row["answer"]) < task.CHAINS.response_tokens


def test_rejected_answer_has_one_wrong_digit():
    for row in task.pairs(100, seed=4):
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1


def test_reward_is_the_share_of_matching_characters():
    rewards = task.reward(["ab", "abcd", "", "xb"], ["ab", "ab", "ab", "ab"])
    assert rewards == [1.0, 0.5, 0.0, 0.5]


def test_meter_writes_the_steps_after_the_warm_up(tmp_path, monkeypatch):
    meter = Meter(tmp_path / "result.json")
    clock = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr("benchmarks.compare.meter.time", SimpleNamespace(perf_counter=lambda: clock["wall"]))
    monkeypatch.setattr(meter, "cpu_seconds", lambda: clock["cpu"])
    for tokens in range(WARM + 3):
        meter.mark(tokens=tokens)
        clock["wall"] += 10
        clock["cpu"] += 3
    meter.write(version="1")
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["steps"] == [{"wall": 10.0, "cpu": 3.0, "tokens": tokens} for tokens in (WARM + 1, WARM + 2)]
    assert content["version"] == "1"
    assert content["peak_bytes"] > 10**8


def test_meter_counts_child_processes(tmp_path):
    meter = Meter(tmp_path / "result.json")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in [process.pid for process in meter.family()]
        child.communicate(b"\n")


def test_layer_products_match_the_number_of_weights():
    weights = 256 * 512 + 256 * 256 + 3 * 256 * 512  # queries, keys and values; output; gate, up and down
    assert sum(inputs * outputs for inputs, outputs in floor.layers_of(task.ARCHITECTURE)) == weights


def test_prompt_of_sums_has_an_example_and_ends_before_the_answer():
    for row in task.sums(50, seed=1):
        problems = re.findall(r"user\n(\d+) \+ (\d+)<", row["prompt"])
        assert problems[0] == ("13", "24")
        a, b = map(int, problems[1])
        assert row["answer"] == f"{a} + {b} = {a + b}"
        assert row["prompt"].endswith("<|im_start|>assistant\n")


def test_ratios_are_relative_to_the_first_library():
    def turns(cpu):
        return [{"steps": [{"cpu": cpu, "wall": 2 * cpu, "tokens": 1000, "reward": 0.5}] * 3, "peak_bytes": 2**20}]

    rows = command.table_of({"ours": turns(2.0), "theirs": turns(4.0)})[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert (
        " | ".join(cells[0]) == "ours | 3 | 2.00 | 2.00 to 2.00 | 1.00 | 2.000 | 1.00 | 4.00 | 1.00 | 1 | 0.50 to 0.50"
    )
    assert " | ".join(cells[1]) == (
        "theirs | 3 | 4.00 | 4.00 to 4.00 | 0.50 | 4.000 | 0.50 | 8.00 | 0.50 | 1 | 0.50 to 0.50"
    )


def test_failed_run_is_reported_with_its_name_and_log(tmp_path):
    with pytest.raises(SystemExit, match=r"ended with 3, see .*log$"):
        command.measure([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "result.json", tmp_path / "log")


def test_page_has_the_measured_figures():
    turn = {"steps": [{"cpu": 2.0, "wall": 4.0, "tokens": 1000}], "peak_bytes": 2**20}
    costs = {
        "push": {"megabytes": 233.0, "copy": 0.03, "trainer": 0.04, "engine": 0.18},
        "start": {"a command": 1.25},
        "engine": {"tokens_per_cpu_s": 3258.0},
        "vllm": {"tokens_per_cpu_s": 3588.0},
    }
    timed = {"steps": [{"wall": 4.0, "parts": dict.fromkeys(task.PARTS, 0.5)}] * 3}
    updates = {"tokens": 900.0, "response_tokens": 500.0, "update": 3.0, "products": 1.5}
    measured = {
        "tasks": {"sft": {"lightning-rlhf": [turn], "TRL": [turn]}},
        "floors": {"grpo, lightning-rlhf": updates},
        "limits": {"dpo": {"ours": 6.0, "peer": 10.0, "generation": 1.0, "products": 3.0}},
        "parts": {"grpo, lightning-rlhf": command.parts_of([timed])},
        "batches": {1: 2.0, 16: 2.1},
        "costs": costs,
        "head": {32_000: 84},
        "divergences": {
            "lightning-rlhf": {"seconds": 2.0, "mb": 400, "loss": 0.25},
            "TRL": {"seconds": 5.0, "mb": 700, "loss": 0.25},
        },
        "lifecycle": {
            part: {
                library: {"wall": 4.0 * factor, "cpu": 3.0, "peak_bytes": 2**20, "wait": 0.5 * factor, "megabytes": 9.0}
                for library, factor in (("ours", 1), ("trl", 2))
            }
            for part in command.LIFECYCLE
        },
        "dates": [date(2026, 11, 22), date(2026, 11, 23)],
        "machine": "2 cores of X",
        "commit": "abc",
        "machines": [
            {
                "machine": "X",
                "commit": "abc",
                "cpu_seconds": {"sft": {"lightning-rlhf": 2.0, "TRL": 4.0, f"ours, {MKL}": 3.0}},
            },
            {"machine": "Y", "commit": "def", "cpu_seconds": {"dpo": {"lightning-rlhf": 1.0, "TRL": 3.0}}},
        ],
    }
    page = command.report(measured)
    for line in (
        "| TRL | 1 | 2.00 | 2.00 to 2.00 | 1.00 | 2.000 | 1.00 | 4.00 | 1.00 | 1 | - |",
        "| grpo, lightning-rlhf | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 1.00 |",
        "| grpo, lightning-rlhf | 900 | 500 | 3.00 | 1.50 | 2.00 |",
        "| dpo | 10.00 | 1.00 | 3.00 | 6.00 | 0.60 | 0.40 |",
        "| 4,096 | 2.100 |",
        "| push of them, in vLLM | 0.18 |",
        "| `a command` | 1.25 |",
        "the same requests 3588.",
        "| 32,000 | 84 | 500 |",
        "| TRL | 5.00 | 0.40 | 700 | 0.250000 |",
        "| wait for a checkpoint of SmolLM2 with AdamW | 0.50 | 1.00 | 0.50 | 3.0 | 3.0 | 1 | 1 |",
        "| X | abc | sft | 0.50 | 0.75 |",
        "| Y | def | dpo | 0.33 | - |",
    ):
        assert line in page.splitlines(), line
    none = {
        "floors": {},
        "limits": {},
        "parts": {},
        "batches": {},
        "costs": None,
        "divergences": None,
        "lifecycle": None,
    }
    without = command.report({**measured, **none})
    assert "## Batch sizes" not in without
    assert "## Pushes" not in without
    assert "## Distillation" not in without
    assert "## Updates" not in without
    assert "## What the same" not in without
    assert "## Start" not in without


def test_cost_per_token_is_the_median_over_steps():
    steps = [{"cpu": cpu, "tokens": 1000} for cpu in (1.0, 2.0, 9.0)]
    assert command.per_token({"steps": steps}) == 2.0
