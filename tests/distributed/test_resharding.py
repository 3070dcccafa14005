"""A checkpoint written by any strategy on any number of processes is read by any other without changing a bit.

For each pair, the reader resumes from the writer's checkpoint and writes it again immediately, which must give the same
bits of weights, moments, counts and settings, and the same schedules, KL controller and position in the data. Then it
trains one more step, whose result must equal that of a single process that resumes from the same checkpoint.

    python -m tests.distributed.test_resharding      walks all pairs and prints the table of docs/tested.md
"""

import itertools
import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests import figures
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.reshard_ranks import bits_that_differ, largest_weight_difference, roles
from tests.distributed.test_parity import DEEPSPEED, SHARDED

FSDP = "lightning_rlhf.strategies.fsdp:RLHFFSDPStrategy"
# Short name: strategy and number of processes.
PLACES = {
    "single": ("rlhf_single", 1),
    "ddp 2": ("rlhf_ddp", 2),
    "fsdp 2": ("rlhf_fsdp", 2),
    "fsdp 3": ("rlhf_fsdp", 3),
    "fsdp 4": ("rlhf_fsdp", 4),
    "fsdp 4, replicas 2": ([FSDP, {"shard_size": 2}], 4),
    "fsdp 4, tp 2": ([FSDP, {"tensor_parallel_size": 2}], 4),
    "fsdp 2, sp 2": ([FSDP, {"sequence_parallel_size": 2}], 2),
    "fsdp 4, sp 2": ([FSDP, {"sequence_parallel_size": 2}], 4),
    "fsdp 4, sp 2, replicas 2": ([FSDP, {"sequence_parallel_size": 2, "shard_size": 1}], 4),
    "zero-1 2": ("rlhf_deepspeed_stage_1", 2),
    "zero-2 2, offload": ("rlhf_deepspeed_stage_2_offload", 2),
    "zero-3 2": ([DEEPSPEED, SHARDED], 2),
    "zero-3 3": ([DEEPSPEED, SHARDED], 3),
}
BASIC = ("single", "ddp 2", "fsdp 2", "fsdp 4", "fsdp 4, replicas 2", "zero-1 2", "zero-3 2")
PLAIN, TIED, LORA = {}, {"tied": True}, {"lora": True}
# Two key and value heads, because two processes divide them.
REWARD_MODEL, TWO_HEADS = {"kind": "rm", "heads": 2}, {"heads": 2}
# Kind of run: options (PPO by default), and pairs of the writer of a checkpoint and its reader.
WALKS = {
    "whole": (PLAIN, [*itertools.product(BASIC, BASIC)]),
    "sizes that do not divide": (PLAIN, [("single", "fsdp 3"), ("zero-3 2", "fsdp 3"), ("single", "zero-3 3"),
                                         ("fsdp 3", "zero-3 3"), ("zero-3 3", "fsdp 2"), ("fsdp 3", "single")]),
    "offload": (PLAIN, [("zero-3 2", "zero-2 2, offload"), ("zero-2 2, offload", "single")]),
    "tensor parallel": (REWARD_MODEL, [("single", "fsdp 4, tp 2"), ("fsdp 4, tp 2", "zero-1 2"),
                                       ("fsdp 4, tp 2", "single"), ("fsdp 4, tp 2", "fsdp 4, replicas 2"),
                                       ("fsdp 4, replicas 2", "fsdp 4, tp 2")]),
    "sequence parallel": (TWO_HEADS, [(a, "fsdp 4, sp 2") for a in BASIC] + [("fsdp 4, sp 2", b) for b in BASIC] +
                          [("fsdp 2, sp 2", "fsdp 4, sp 2, replicas 2"), ("fsdp 4, sp 2, replicas 2", "fsdp 2, sp 2"),
                           ("fsdp 4, sp 2", "fsdp 4, tp 2"), ("fsdp 4, tp 2", "fsdp 4, sp 2")]),
    "tied": (TIED, [("zero-3 2", "fsdp 2"), ("fsdp 2", "ddp 2"), ("ddp 2", "zero-3 2"), ("fsdp 2", "single")]),
    "LoRA": (LORA, [("single", "zero-3 2"), ("zero-3 2", "fsdp 2"), ("fsdp 2", "zero-1 2"), ("zero-1 2", "single")]),
}  # fmt: skip
ERROR = 1e-5  # absolute, of weights, one step further


def launch(runs):
    """Execute each run on its number of processes; runs with the same number share one launch."""
    for count in sorted({PLACES[place][1] for place, _ in runs}):
        requested = [{"strategy": PLACES[place][0], **run} for place, run in runs if PLACES[place][1] == count]
        run_ranks("tests.distributed.reshard_ranks:walk", count, requested, seconds=900)


def again(folder, writer, reader):
    """Return where the reader writes the checkpoint that it has read."""
    return folder / f"{writer} to {reader}, again"


def one_step_on(folder, writer, reader):
    """Return where the reader writes its checkpoint after one more step."""
    return folder / f"{writer} to {reader}, one step on"


def walked(kinds, folder):
    """Execute all pairs of some kinds of run; yield kind, writer, reader, the difference and the final error."""
    begun, written, read = [], [], []
    for kind in kinds:
        options, pairs = WALKS[kind]
        at = Path(folder, kind)
        begun.append(("single", {"steps": 1, "options": options, "write": f"{at}/start"}))
        for writer in dict.fromkeys(writer for writer, _ in pairs):  # its own step, so that its own state is written
            run = {"steps": 2, "options": options, "read": f"{at}/start", "write": f"{at}/{writer}"}
            written.append((writer, run))
        in_one_process = [(writer, "single") for writer, _ in pairs]
        for writer, reader in dict.fromkeys([*pairs, *in_one_process]):  # each pair once
            run = {"steps": 3, "options": options, "read": f"{at}/{writer}", "again": str(again(at, writer, reader))}
            read.append((reader, {**run, "write": str(one_step_on(at, writer, reader))}))
    for runs in (begun, written, read):
        launch(runs)
    for kind in kinds:
        for writer, reader in WALKS[kind][1]:
            at = Path(folder, kind)
            differs = bits_that_differ(at / writer, again(at, writer, reader))
            error = largest_weight_difference(one_step_on(at, writer, reader), one_step_on(at, writer, "single"))
            yield kind, writer, reader, differs, error


def assert_walks(kinds, folder, limit=ERROR):
    seen = []
    for kind, writer, reader, differs, error in walked(kinds, folder):
        figures.record("difference of weights", error)
        assert differs is None, f"{kind}, {writer} to {reader}: {differs}"
        assert error <= limit, f"{kind}, {writer} to {reader}: {error}"
        seen.append((kind, writer, reader))
    assert seen == [(kind, *pair) for kind in kinds for pair in WALKS[kind][1]]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes start in it
def test_pairs_that_cover_every_way_of_storing_state(tmp_path, monkeypatch):
    """Three of the pairs that :func:`test_documented_pairs_of_strategies` walks, in minutes."""
    ring = [("ddp 2", "fsdp 2"), ("fsdp 2", "zero-3 2"), ("zero-3 2", "ddp 2")]
    monkeypatch.setitem(WALKS, "ring", (TIED, ring))
    assert_walks(["ring"], tmp_path)
    at = tmp_path / "ring"
    # and the step between them moved weights and moments by more than is asked for
    assert largest_weight_difference(at / "start", at / "ddp 2") > 10 * ERROR
    assert "optim.state.lm.model.norm.weight.exp_avg_sq" in roles(at / "zero-3 2")["actor"][0]
    assert bits_that_differ(at / "start", at / "ddp 2") is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_momentum_of_muon_is_read_by_every_strategy_that_keeps_matrices(tmp_path, monkeypatch):
    pairs = [("single", "fsdp 2"), ("fsdp 2", "ddp 2"), ("ddp 2", "single")]
    monkeypatch.setitem(WALKS, "muon", ({"muon": True}, pairs))
    assert_walks(["muon"], tmp_path, limit=1e-3)  # the orthogonalisation computes in bfloat16
    momentum = "optim.state.lm.model.layers.0.mlp.up_proj.weight.momentum_buffer"
    assert momentum in roles(tmp_path / "muon/fsdp 2")["actor"][0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_documented_pairs_of_strategies(tmp_path):
    assert_walks(list(WALKS), tmp_path)


def rows_of(text):
    """Return the rows of the table: kind, writer, reader, whether the bits are equal, and the error after one step."""
    return re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \| (\w+) \| (\S+) \|$", text, re.MULTILINE)


def test_documented_table_is_for_these_pairs_and_within_these_limits():
    rows = rows_of((ROOT / "docs/tested.md").read_text())
    assert [row[:3] for row in rows] == [(kind, *pair) for kind, (_, pairs) in WALKS.items() for pair in pairs]
    assert all(equal == "equal" and float(error) <= ERROR for *_, equal, error in rows)


def main():
    print("| run | written by | read by | written again | one step further |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind, writer, reader, differs, error in walked(list(WALKS), folder):
            print(f"| {kind} | `{writer}` | `{reader}` | {'equal' if differs is None else differs} | {error:.1e} |")


if __name__ == "__main__":
    sys.exit(main())
