import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.batching.micro import shared_prompt_batches, token_budget_batches
from tests.helpers import properties

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def test_case_worked_by_hand():
    # sorted: row 1 (9 tokens), rows 3 and 4 (5 each), row 0 (4), row 2 (1); budget 12
    # 9 + another row at width 9 is 18 > 12; 5 + 5 = 10 fits, a third at width 5 is 15; 4 + 4 = 8 fits
    batches = token_budget_batches(torch.tensor([4, 9, 1, 5, 5]), 12)
    assert [rows.tolist() for rows in batches] == [[1], [3, 4], [0, 2]]


@properties
@given(lengths_lists, st.integers(1, 120))
def test_every_row_appears_once_within_the_budget_and_longest_first(lengths, budget):
    batches = [rows.tolist() for rows in token_budget_batches(torch.tensor(lengths), budget)]
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
    flat = [lengths[row] for rows in batches for row in rows]
    assert flat == sorted(flat, reverse=True)


@properties
@given(lengths_lists, st.integers(1, 120))
def test_batches_could_not_take_the_next_row(lengths, budget):
    batches = [rows.tolist() for rows in token_budget_batches(torch.tensor(lengths), budget)]
    for rows in batches[:-1]:
        assert (len(rows) + 1) * lengths[rows[0]] > budget


def test_equal_lengths_keep_their_order():
    (rows,) = token_budget_batches(torch.full((20,), 3), 60)
    assert rows.tolist() == list(range(20))


def test_row_longer_than_the_budget_is_alone_in_its_batch():
    assert [rows.tolist() for rows in token_budget_batches(torch.tensor([50, 60]), 10)] == [[1], [0]]


def test_empty_input_makes_no_batches():
    assert token_budget_batches(torch.tensor([], dtype=torch.long), 10) == []


@pytest.mark.parametrize("budget", [0, -1])
def test_budget_must_be_positive(budget):
    with pytest.raises(ValueError, match=rf"^micro_batch_tokens must be positive, got {budget}$"):
        token_budget_batches(torch.tensor([1]), budget)


def test_responses_that_share_prompts_worked_by_hand():
    # Prompt 0 has 3 tokens and responses of 2, 5 and 4: 5 + 4 + 3 = 12, and 3 + 2 = 5 as its own part.
    # Prompt 1 has 6 tokens and a response of 1: 7 tokens, which fit beside the 5.
    batches = shared_prompt_batches([3, 6, 3, 3], [2, 1, 5, 4], [0, 1, 0, 0], 12)
    assert [rows.tolist() for rows in batches] == [[2, 3], [1, 0]]


GROUPED = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=20)


@properties
@given(GROUPED, st.integers(1, 60))
def test_every_response_appears_once_within_the_budget_unless_alone(rows, budget):
    prompts = [prompt for prompt, _ in rows]
    lengths = [3 * prompt + 1 for prompt in prompts]
    responses = [length for _, length in rows]
    batches = [batch.tolist() for batch in shared_prompt_batches(lengths, responses, prompts, budget)]
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        tokens = sum(responses[row] for row in batch) + sum(
            3 * prompt + 1 for prompt in {prompts[row] for row in batch}
        )
        assert len(batch) == 1 or tokens <= budget


def test_responses_to_a_prompt_stay_together_where_they_fit():
    batches = shared_prompt_batches([5] * 6, [4, 3, 2, 4, 3, 2], [0, 0, 0, 1, 1, 1], 20)
    assert [sorted(rows.tolist()) for rows in batches] == [[0, 1, 2], [3, 4, 5]]
