import torch
from hypothesis import given

from lightning_rlhf.batching.sequences import concatenate, join, pad_right
from tests.helpers import properties, seeds
from tests.stand_ins import Response, responses, rollout_of


def test_rows_are_padded_on_the_right():
    ids, lengths = pad_right([[5, 6, 7], [8], [9, 1]], pad=4)
    assert ids.tolist() == [[5, 6, 7], [8, 4, 4], [9, 1, 4]]
    assert lengths.tolist() == [3, 1, 2]
    assert ids.dtype == lengths.dtype == torch.int64


def test_padding_is_0_by_default():
    assert pad_right([[5], [6, 7]])[0].tolist() == [[5, 0], [6, 7]]


def test_joining_a_case_worked_by_hand():
    rollout = rollout_of([Response([1, 2, 3], [4, 5]), Response([6], [7, 8, 9])], extra_columns=1)
    ids, index = join(rollout)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    # the token before: 3 predicts 4, 4 predicts 5; positions after the response stay inside the row
    assert index[:, :2].tolist() == [[2, 3], [0, 1]]
    assert index.tolist() == [[2, 3, 4, 4], [0, 1, 2, 3]]


@properties
@given(seeds)
def test_each_response_follows_its_prompt_and_each_index_points_to_the_previous_token(seed):
    rows = responses(5, seed % 1000)
    rollout = rollout_of(rows, extra_columns=seed % 3)
    ids, index = join(rollout)
    assert ids.shape[1] == max(len(row.prompt) + len(row.tokens) for row in rows)
    for i, row in enumerate(rows):
        text = row.prompt + row.tokens
        assert ids[i].tolist() == text + [0] * (ids.shape[1] - len(text))
        for t, token in enumerate(row.tokens):
            assert ids[i, index[i, t] + 1] == token
    assert index.max() < ids.shape[1]


def test_concatenated_rollouts_keep_their_rows_and_renumber_their_groups():
    first = rollout_of([Response([1], [2, 3], 0.5), Response([4, 5], [6], 1.0)])
    second = rollout_of([Response([7, 8, 9], [1, 2, 3], -1.0)])
    first.group[:] = 0
    both = concatenate([first, second, first[[1]]])
    assert both.prompt_ids.shape == both.response_ids.shape == (4, 3)
    assert both.group.tolist() == [0, 0, 1, 2]
    assert both.reward.tolist() == both.rewards["given"].tolist() == [0.5, 1.0, -1.0, 1.0]
    ids, _ = join(both)
    for i, row in enumerate(([1, 2, 3], [4, 5, 6], [7, 8, 9, 1, 2, 3], [4, 5, 6])):
        assert ids[i].tolist() == row + [0] * (6 - len(row))
    assert both.response_mask.sum(1).tolist() == [2, 1, 3, 1]
