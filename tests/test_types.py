import copy
import dataclasses
import pickle

import pytest
import torch

from lightning_rlhf.types import (
    Completion,
    Experience,
    PreferenceBatch,
    Rollout,
    SamplingLimits,
    SamplingParams,
    SequenceBatch,
    TokenPrompt,
)
from tests.stand_ins import prompt_batch

ROWS, PROMPT, TOKENS = 3, 2, 4
PER_TOKEN = tuple(field.name for field in dataclasses.fields(Experience) if field.name not in ("teacher", "scale"))[2:]


@pytest.fixture
def rollout():
    """A rollout of three responses, the last two to the same prompt; its numbers identify the rows."""
    row = torch.arange(ROWS)
    return Rollout(
        prompt_ids=row.view(-1, 1).expand(ROWS, PROMPT) + 10,
        prompt_lengths=torch.tensor([1, 2, 2]),
        response_ids=row.view(-1, 1).expand(ROWS, TOKENS) + 20,
        response_lengths=torch.tensor([4, 3, 1]),
        response_mask=torch.arange(TOKENS) < torch.tensor([[4], [3], [1]]),
        rollout_logprobs=-row.view(-1, 1).expand(ROWS, TOKENS).float(),
        rewards={"right": row.float(), "brief": torch.tensor([0.5, torch.nan, 1.0])},
        reward=row.float(),
        group=torch.tensor([0, 1, 1]),
        truncated=torch.tensor([True, False, False]),
        policy_version=torch.tensor([[7], [7], [8]]) * (torch.arange(TOKENS) < torch.tensor([[4], [3], [1]])),
        included=torch.tensor([True, False, True]),
        position=torch.tensor([4, 2, 3]),
        temperature=0.7,
    )


@pytest.fixture
def experience(rollout):
    """An experience for the rollout with eight different (B, T) tensors, so that a swapped field is detected."""
    token = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS).float()
    tensors = {name: token + 100 * i for i, name in enumerate(PER_TOKEN)}
    return Experience(rollout, torch.arange(ROWS).float(), **tensors)


def _sequences(rows=2, lengths=(3, 2)):
    return SequenceBatch(torch.ones(rows, 3).long(), torch.tensor(lengths), torch.zeros(rows, 3).bool())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, r"^max_tokens must be at least 1, got 0$"),
        ({"temperature": -0.1}, r"^temperature must be 0 \(greedy\) or positive, got -0.1$"),
    ],
)
def test_invalid_sampling_parameters_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 8} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_p": 0.0}, r"^top_p must lie in \(0, 1\], got 0.0$"),
        ({"top_p": 1.1}, r"^top_p must lie in \(0, 1\], got 1.1$"),
        ({"top_k": -1}, r"^top_k must be 0 \(keep all tokens\) or positive, got -1$"),
        ({"min_p": -0.1}, r"^min_p must lie in \[0, 1\], got -0.1$"),
        ({"min_p": 1.5}, r"^min_p must lie in \[0, 1\], got 1.5$"),
    ],
)
def test_invalid_limits_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingLimits(**arguments)


def test_sampling_uses_the_whole_distribution_by_default():
    assert SamplingParams(1) == SamplingParams(
        1, temperature=1.0, limits=SamplingLimits(1.0, 0, 0.0), stop_token_ids=()
    )
    assert not SamplingLimits()


@pytest.mark.parametrize(("tokens", "logprobs"), [([], []), ([1, 2], [-1.0]), ([1], [-1.0, -2.0])])
def test_completion_needs_one_logprob_per_token(tokens, logprobs):
    message = "^a completion needs one log-probability per token and at least one token, "
    with pytest.raises(ValueError, match=rf"{message}got {len(tokens)} tokens and {len(logprobs)} log-probabilities$"):
        Completion(tokens, logprobs, "stop", 0)


def test_completion_of_one_token_is_allowed():
    assert Completion([1], [-1.0], "length", 3).policy_version == 3


def test_prompt_batch_has_a_length_and_no_device():
    prompts = prompt_batch([4, 5], [[1], [1, 2]], ["a", "b"], {"answer": [1, 2]})
    assert len(prompts) == 2
    assert prompts.epoch == 0
    assert prompts.to("meta") is prompts


def test_rollout_counts_its_responses_and_tokens(rollout):
    assert len(rollout) == ROWS
    assert rollout.total_lengths.tolist() == [5, 5, 3]


def test_rollout_temperature_defaults_to_1(rollout):
    fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(Rollout)}
    assert Rollout(**{name: value for name, value in fields.items() if name != "temperature"}).temperature == 1.0


def test_indexing_takes_rows_of_every_tensor_in_the_given_order(rollout):
    taken = rollout[[2, 0, 2]]
    for field in dataclasses.fields(Rollout):
        value = getattr(rollout, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(taken, field.name), value[[2, 0, 2]]), field.name
    assert taken.rewards["right"].tolist() == [2, 0, 2]
    assert taken.rewards["brief"].tolist() == [1, 0.5, 1]
    assert taken.temperature == 0.7


def test_indexing_an_experience_also_indexes_its_rollout(experience):
    taken = experience[torch.tensor([1])]
    assert len(taken) == 1
    assert taken.rollout.reward.tolist() == [1]
    for name in PER_TOKEN:
        assert torch.equal(getattr(taken, name), getattr(experience, name)[1:2]), name


def test_empty_selection_is_a_valid_batch(experience):
    nothing = experience[[]]
    assert len(nothing) == 0
    assert nothing.mask.shape == (0, TOKENS)


def test_to_moves_nested_tensors_and_keeps_other_fields(experience):
    moved = experience.to("meta")
    tensors = [*moved._rows(), *moved.rollout.rewards.values()]
    assert len(tensors) == 1 + len(PER_TOKEN) + 12 + 2
    assert all(tensor.is_meta for tensor in tensors)
    assert moved.rollout.temperature == 0.7
    assert not experience.advantages.is_meta


def test_to_passes_its_options_to_tensors(experience):
    moved = experience.to("cpu", dtype=torch.float64, non_blocking=True)
    assert moved.values.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("response_ids", (2, TOKENS), (ROWS, TOKENS)),
        ("response_mask", (ROWS, 3), (ROWS, TOKENS)),
        ("rollout_logprobs", (TOKENS, ROWS), (ROWS, TOKENS)),
        ("prompt_lengths", (2,), (ROWS,)),
        ("response_lengths", (ROWS, 1), (ROWS,)),
        ("reward", (ROWS, TOKENS), (ROWS,)),
        ("group", (), (ROWS,)),
        ("truncated", (1,), (ROWS,)),
        ("policy_version", (ROWS,), (ROWS, TOKENS)),
    ],
)
def test_rollout_with_a_wrong_shape_reports_the_field_and_both_shapes(rollout, name, shape, expected):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        dataclasses.replace(rollout, **{name: torch.zeros(shape)})
    assert str(error.value) == f"Rollout.{name} has shape {shape}, expected {expected}"


def test_reward_with_a_wrong_shape_is_reported(rollout):
    with pytest.raises(ValueError, match=r"^Rollout.rewards\['right'\] has shape \(2,\), expected \(3,\)$"):
        dataclasses.replace(rollout, rewards={"right": torch.zeros(2)})


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "values", "token_rewards", "advantages", "returns"])
def test_experience_with_a_wrong_shape_reports_the_field_and_both_shapes(experience, name):
    with pytest.raises(ValueError, match=rf"^Experience.{name} has shape \(3, 3\), expected \(3, 4\)$"):
        dataclasses.replace(experience, **{name: torch.zeros(ROWS, 3)})


def test_batches_are_immutable(rollout):
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.reward = torch.zeros(ROWS)


def test_sequence_batch_is_counted_and_validated():
    sequences = _sequences()
    assert len(sequences) == 2
    assert sequences.total_lengths.tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"^SequenceBatch.lengths has shape \(1,\), expected \(2,\)$"):
        dataclasses.replace(sequences, lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"^SequenceBatch.loss_mask has shape \(2, 4\), expected \(2, 3\)$"):
        dataclasses.replace(sequences, loss_mask=torch.zeros(2, 4))


def test_pairs_are_sliced_together_and_have_twice_the_longer_length():
    pairs = PreferenceBatch(_sequences(2, (3, 1)), _sequences(2, (2, 3)), margin=torch.tensor([0.0, 1.0]))
    assert len(pairs) == 2
    assert pairs.total_lengths.tolist() == [6, 6]
    second = pairs[[1]]
    assert second.chosen.lengths.tolist() == [1]
    assert second.rejected.lengths.tolist() == [3]
    assert second.margin.tolist() == [1]


def test_mismatched_pairs_are_rejected():
    with pytest.raises(ValueError, match=r"^PreferenceBatch.margin has shape \(1,\), expected \(2,\)$"):
        PreferenceBatch(_sequences(), _sequences(), margin=torch.zeros(1))
    with pytest.raises(ValueError, match=r"^PreferenceBatch.rejected.lengths has shape \(1,\), expected \(2,\)$"):
        PreferenceBatch(_sequences(), _sequences(1, (3,)), margin=torch.zeros(2))


def test_prompts_are_sliced_with_their_messages():
    chats = [[{"role": "user", "content": letter}] for letter in "ab"]
    prompts = prompt_batch([4, 5], [[1], [1, 2]], ["a", "b"], {"answer": [1, 2]}, messages=chats)
    (prompt,) = prompts[1:]
    assert (prompt.messages, prompt.columns, prompt.position) == (chats[1], {"answer": 2}, 1)
    (prompt,) = prompts.take([1])
    assert (prompt.index, prompt.position) == (5, 1)


def test_columns_of_a_prompt_are_read_only_and_survive_copies():
    columns = {"answer": 1}
    (prompt,) = prompt_batch([4], [[1]], ["a"], {"answer": [1]})
    with pytest.raises(TypeError, match="does not support item assignment"):
        prompt.columns["answer"] = 2
    assert prompt.columns == columns
    for copied in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert copied == prompt
        with pytest.raises(TypeError, match="does not support item assignment"):
            copied.columns["answer"] = 2


def test_prompt_of_an_engine_is_a_sequence_of_tokens():
    prompt = TokenPrompt([4, 5, 6])
    assert (len(prompt), list(prompt), prompt[1:], prompt.encoded_images) == (3, [4, 5, 6], [5, 6], ())


def test_boolean_mask_selects_rows(rollout):
    assert rollout[rollout.truncated].policy_version.tolist() == [[7] * TOKENS]
    assert rollout[~rollout.truncated].group.tolist() == [1, 1]


def test_experience_has_the_length_of_its_rollout(experience):
    assert experience.total_lengths.tolist() == [5, 5, 3]
