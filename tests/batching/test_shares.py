"""Division of a batch between ranks by rows and by tokens."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.batching.shares import balanced_shares
from tests.helpers import properties


def test_case_worked_by_hand():
    # longest first: row 1 (9), 3 (5), 4 (5), 0 (4), 2 (1); there: 1 to rank 0, 3 to rank 1; back: 4 to rank 1,
    # 0 to rank 0; there: 2 to rank 0
    assert balanced_shares([4, 9, 1, 5, 5], 2) == [[0, 1, 2], [3, 4]]


def test_single_rank_has_all_rows_in_order():
    assert balanced_shares([3, 1, 2], 1) == [[0, 1, 2]]


@properties
@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(1, 8))
def test_every_row_appears_once_and_ranks_differ_by_at_most_one_row(lengths, ranks):
    shares = balanced_shares(lengths, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share == sorted(share) for share in shares)


@properties
@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(1, 8))
def test_ranks_differ_by_at_most_the_tokens_of_the_longest_row(lengths, ranks):
    tokens = [sum(lengths[row] for row in share) for share in balanced_shares(lengths, ranks)]
    assert max(tokens) - min(tokens) <= max(lengths)
