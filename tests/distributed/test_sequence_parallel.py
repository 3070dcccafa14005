"""Sequence parallelism: scores and gradients of divided rows are those of one process; other models are rejected.

python -m tests.distributed.test_sequence_parallel      measures memory and seconds and prints the table of
                                                         docs/tested.md
"""

import pytest
import torch

from lightning_rlhf import FromConfig
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.packed_attention import ARCHITECTURES
from lightning_rlhf.models.sequence_parallel import SequenceRanks, repeated_keys
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from lightning_rlhf.strategies.sequence_parallel import check_sequence_parallel
from tests.distributed.launch import run_ranks
from tests.models.test_packed_attention import source

SCORES, GRADIENTS = 2e-6, 2e-5  # relative to the largest number
CASES = [(2, ["gemma2", "qwen3"])]  # sliding windows and soft caps, norms of heads
CASES += [pytest.param(count, sorted(ARCHITECTURES), marks=pytest.mark.slow) for count in (2, 4)]


def assert_equal(result):
    """Check the differences of scores and gradients of each case."""
    for name, (scores, gradients) in result.items():
        assert scores < SCORES, name
        assert gradients < GRADIENTS, name


def run(function, ranks, *arguments, **options):
    return run_ranks(f"tests.distributed.sequence_ranks:{function}", ranks, *arguments, **options)


@pytest.mark.parametrize(("count", "names"), CASES, ids=["quick", "two", "four"])
def test_all_architectures_and_layouts_equal_one_process(count, names):
    for result in run("architectures", count, names):
        assert len(result) == 3 * len(names)
        assert_equal(result)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_key_heads_are_repeated_where_they_are_few(count):
    for result in run("key_heads", count):
        assert_equal(result)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_critics_equal_one_process(count):
    for result in run("scalar", count):
        assert_equal(result)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_teachers_and_distillation_equal_one_process(count):
    for result in run("teachers", count):
        for top_k, (outputs, scores, loss, gradients) in result.items():
            assert max(outputs, scores, loss) < SCORES, top_k
            assert gradients < GRADIENTS, top_k


@pytest.mark.slow
def test_recomputed_activations_and_half_precision():
    for result in run("checkpointed", 2):
        scores, gradients = result["exact"]
        assert scores < SCORES
        assert gradients < GRADIENTS
        assert result["bfloat16"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_long_texts_with_a_sliding_window(count):
    for scores, gradients in run("long_texts", count, 5000):
        assert scores < 5 * SCORES
        assert gradients < 5 * GRADIENTS


def test_parts_of_a_row_are_padded():
    row = torch.arange(1, 8).unsqueeze(0)
    parts = [SequenceRanks(rank, 3, None).part(row) for rank in range(3)]
    assert torch.cat(parts, dim=1).tolist() == [[1, 2, 3, 4, 5, 6, 7, 0, 0]]
    owners = [SequenceRanks(rank, 3, None).is_local(torch.arange(7), 3) for rank in range(3)]
    assert torch.stack(owners).long().argmax(0).tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("heads", "ranks", "expected"), [(4, 2, 4), (1, 2, 2), (3, 2, 6), (2, 4, 4), (6, 4, 12)])
def test_keys_are_repeated_as_rarely_as_possible(heads, ranks, expected):
    keys = torch.arange(heads).view(1, heads, 1, 1).float()
    repeated = repeated_keys(keys, ranks)
    assert repeated.shape[1] == expected
    assert repeated.flatten().tolist() == sorted(repeated.flatten().tolist())


def check(name, size=2, tensor_parallel_size=1, **options):
    check_sequence_parallel("actor", source(name, **options).causal().lm, size, tensor_parallel_size)


def test_unsuitable_models_are_rejected():
    check("llama")
    check("llama", 1, attention="eager")
    with pytest.raises(
        UsageError, match=r"is not supported for the actor's GPT2LMHeadModel; supported are deepseek_v3"
    ):
        check_sequence_parallel(
            "actor", FromConfig({"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1}).causal().lm, 2
        )
    with pytest.raises(UsageError, match=r"LlamaForCausalLM; supported are .* with their default attention"):
        check("llama", attention="sdpa")
    with pytest.raises(
        UsageError, match="sequence_parallel_size: 3 does not divide the 4 attention heads of the actor"
    ):
        check("llama", 3)
    with pytest.raises(
        UsageError, match="sequence_parallel_size: 4 times tensor_parallel_size: 2 does not divide the 4"
    ):
        check("llama", 4, 2)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UsageError, match="rotary positions of type dynamic, whose factors depend on the length"):
        check("llama", rope_parameters=rope)


def test_sizes_are_validated():
    with pytest.raises(UsageError, match="sequence_parallel_size must be at least 1, got 0"):
        RLHFFSDPStrategy(sequence_parallel_size=0)


def measured(tokens, count):
    """Return the largest rise of the peak memory of a process in bytes, and the CPU seconds of all."""
    results = run("update_of_one_text", count, tokens, seconds=1800)
    return max(memory for memory, _ in results), sum(seconds for _, seconds in results)


@pytest.mark.slow
def test_memory_of_an_update_is_divided():
    """It depends only on the number of tokens of a process."""
    one, two, four = (measured(count * 8192, count)[0] for count in (1, 2, 4))
    assert two == pytest.approx(one, rel=0.05)
    assert four == pytest.approx(one, rel=0.05)


if __name__ == "__main__":
    print("| tokens | processes | MB of a process | CPU seconds of all, per 1,000 tokens |")
    print("|---|---|---|---|")
    for tokens in (4096, 16384, 32768, 65536):
        for count in (1, 2, 4):
            memory, seconds = measured(tokens, count)
            print(f"| {tokens:,} | {count} | {memory / 1e6:.0f} | {1000 * seconds / tokens:.2f} |", flush=True)
