"""The parts of the comparison with other libraries that need neither another library nor minutes."""

import json
import os
import time

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare import floor, task
from benchmarks.compare.meter import WARM, Meter


def test_answers_are_right_and_as_long_as_the_prompt_asks():
    for row in task.problems(200, seed=3):
        words = row["prompt"].rstrip(":").split()
        numbers = [int(word) for word in words if word.isdigit()]
        value, addend, steps = numbers
        lines = row["answer"].split(" ")
        assert len(lines) == steps
        for left, line in zip(range(steps, 0, -1), lines, strict=True):
            assert line == f"{left:02d}:{value}+{addend}={(value + addend) % 10}"
            value = (value + addend) % 10
        assert len(row["answer"]) < task.RESPONSE_TOKENS


def test_a_rejected_answer_has_one_wrong_digit():
    for row in task.pairs(100, seed=4):
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1


def test_the_reward_is_the_share_of_characters_at_their_place():
    rewards = task.reward(["ab", "abcd", "", "xb"], ["ab", "ab", "ab", "ab"])
    assert rewards == [1.0, 0.5, 0.0, 0.5]


def test_the_meter_counts_processor_seconds_of_each_step(tmp_path):
    meter = Meter(tmp_path / "result.json")
    meter.mark()
    for _ in range(WARM):
        meter.mark(tokens=1)
    time.sleep(0.2)  # wall time without processor time
    meter.mark(tokens=2)
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    meter.mark(tokens=3)
    meter.write(version="1")
    content = json.loads((tmp_path / "result.json").read_text())
    idle, busy = content["steps"]
    assert (idle["tokens"], busy["tokens"], content["version"]) == (2, 3, "1")
    assert idle["cpu"] < 0.15
    assert idle["wall"] >= 0.2
    assert busy["cpu"] >= 0.25
    assert content["peak_bytes"] > 10**8


def test_a_forward_pass_has_the_operations_of_its_parameters():
    layers = 4 * (256 * 512 + 256 * 256 + 3 * 256 * 512)  # queries, keys and values; output; gate, up and down
    assert floor.forward_operations(10, 3) == 2 * (10 * layers + 3 * 256 * 64)


def test_ratios_are_those_to_the_first_library():
    def turns(cpu):
        return [{"steps": [{"cpu": cpu, "wall": 2 * cpu, "tokens": 1000, "reward": 0.5}] * 3, "peak_bytes": 2**20}]

    rows = command.table_of({"ours": turns(2.0), "theirs": turns(4.0)})[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert cells[0] == ["ours", "2.00", "2.00 to 2.00", "1.00", "2.000", "1.00", "4.00", "1", "0.50 to 0.50"]
    assert cells[1] == ["theirs", "4.00", "4.00 to 4.00", "0.50", "4.000", "0.50", "8.00", "1", "0.50 to 0.50"]


def test_a_run_that_fails_is_named_with_its_log(tmp_path):
    with pytest.raises(SystemExit, match=r"ended with 3, see .*log$"):
        command.measure([os.fsdecode(b"/bin/sh"), "-c", "exit 3"], tmp_path / "result.json", tmp_path / "log")
