"""A push needs the memory of the largest parameter for any model size; measured in a separate process."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from lightning_rlhf.extras.servers.push import chunks

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# The private memory of a process, without the shared memory that the weights are written to.
MEASURE = """
    import json, re, sys
    from pathlib import Path
    import torch
    from lightning_rlhf.extras.servers.push import chunks
    from lightning_rlhf.rollout.vllm.sync import WeightSender

    def private():
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

    def gathered(mib, value):
        global peak
        tensor = torch.full((mib << 18,), value)
        peak = max(peak, private())  # this parameter, and those that the receiver still holds
        return tensor

    def parameters(count, large):
        for number in range(count):
            yield f"w{number}", gathered(large if number % 4 < 2 else 4, float(number))

    results = []
    for count, large in ((8, 16), (64, 16), (16, 128)):
        sender, peak, before = WeightSender(), 0, private()
        for _ in range(2):  # the first write makes the memory, the second reuses it
            sender.write(parameters(count, large))
        sender.close()
        sent, peak, before_chunks = peak - before, 0, private()
        for chunk in chunks(parameters(count, large), 32 << 20):
            peak = max(peak, private())
            del chunk
        results.append([sent, peak - before_chunks])
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def measured():
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "largest"), [(0, 16 * MIB), (1, 16 * MIB), (2, 128 * MIB)])
def test_push_through_shared_memory_holds_one_parameter(measured, run, largest):
    sent, _ = measured[run]
    assert largest <= sent <= largest + 4 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("run", "largest"), [(0, 16 * MIB), (1, 16 * MIB), (2, 128 * MIB)])
def test_push_in_chunks_holds_a_chunk_and_one_parameter(measured, run, largest):
    _, sent = measured[run]
    assert largest <= sent <= largest + (32 + 4) * MIB


def test_chunks_contain_every_parameter_once_in_order_and_unchanged():
    memory = torch.empty(64)
    sizes = [3, 5, 20, 1, 1, 16, 2, 2]

    def reused():
        for number, size in enumerate(sizes):
            memory[:size] = number  # valid only until the next
            yield f"w{number}", memory[:size]

    result = [[(name, tensor.clone()) for name, tensor in chunk] for chunk in chunks(reused(), 16 * 4)]
    assert [[name for name, _ in chunk] for chunk in result] == [
        ["w0", "w1"],
        ["w2"],
        ["w3", "w4"],
        ["w5"],
        ["w6", "w7"],
    ]
    for number, (_, tensor) in enumerate(pair for chunk in result for pair in chunk):
        assert tensor.tolist() == [number] * sizes[number]
    assert list(chunks([], 8)) == []
