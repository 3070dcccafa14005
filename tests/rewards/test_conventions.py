"""Functions written for TRL, verl and OpenRLHF are called as those libraries do, and their results are read.

The functions have the signatures and conventions of released ones: verl 0.9's ``gsm8k.compute_score``,
``math_dapo.compute_score``, ``default_compute_score`` and a batch function; TRL 1.16's ``accuracy_reward``,
``think_format_reward``, an async one and one that logs; OpenRLHF's ``reward_func``.
"""

import asyncio
import math
import re
import time

import pytest
import torch

from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import OPENRLHF, OURS, VERL, VERL_BATCH, RewardFunction, TrainerState

OFFERED = {
    "prompts": ["1+1?", "2+2?"],
    "completions": ["#### 2", "#### 5"],
    "completion_ids": [[1, 2], [3]],
    "finished": [True, True],
    "ground_truth": ["2", "4"],
    "data_source": ["openai/gsm8k", "other"],
    "level": [1, 2],
}


def scores(function, offered=OFFERED, **options):
    with RewardExecutor([RewardFunction(function, **options)]) as executor:
        return executor.score(offered, TrainerState(7, 100, 1.0))


def rewards(function, offered=OFFERED, **options):
    (values,) = scores(function, offered, **options).rewards.values()
    return [None if math.isnan(value) else value for value in values.tolist()]


# -- verl --------------------------------------------------------------------------------------------------------------


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    result = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str)
    if not result:
        return 0
    return score if result[-1] == ground_truth else format_score


def math_dapo(solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index=None) -> dict:
    correct = solution_str.endswith(ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": solution_str[-1:]}


def default_compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs):
    assert not kwargs
    if data_source == "openai/gsm8k":
        return gsm8k(solution_str, ground_truth), "a tuple is its first part"
    return None if extra_info == {} else extra_info["index"]


async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(len(solution_str) + extra_info.get("index", 0))


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    assert extra_infos == [{}, {}]
    return [
        {"score": float(text.endswith(truth)), "length": len(source)}
        for source, text, truth in zip(data_sources, solution_strs, ground_truths, strict=True)
    ]


def test_verls_functions_of_one_sample():
    assert rewards(gsm8k) == [1, 0]
    assert rewards(gsm8k, arguments={"format_score": 0.25}) == [1, 0.25]
    assert rewards(default_compute_score) == [1, None]
    infos = {**OFFERED, "extra_info": [{"index": 3}, {"index": 4}]}
    assert rewards(default_compute_score, infos) == [1, 4]
    assert rewards(default_compute_score, {**OFFERED, "extra_info": [None, None]}) == [1, None]  # a row without any
    assert rewards(compute_score_async) == [6, 6]
    assert rewards(compute_score_async, infos, timeout_s=5.0) == [9, 10]


def test_verls_dictionary_is_a_score_and_numbers_to_log():
    result = scores(math_dapo)
    assert result.rewards["math_dapo"].tolist() == [1, -1]
    assert result.metrics["reward_math_dapo/acc"] == (1.0, 2.0)
    assert "reward_math_dapo/pred" not in result.metrics  # text has no mean
    assert result.answers == {"math_dapo": [text[-1:] for text in OFFERED["completions"]]}  # votes in validations


def preds(completions):
    returned = [*({"score": 1, "pred": pred} for pred in (0, 1.5, None, "", ["a", 2], torch.tensor(3))), 1.0]
    return [returned[int(text)] for text in completions]


def fails_often(solution_str, ground_truth):
    if len(solution_str) % 2:
        raise ValueError
    return {"score": 1.0, "pred": len(solution_str)}


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_answers_for_votes_are_text_and_none_without_one(timeout_s):
    columns = {"completions": [*"0123456"]}
    with RewardExecutor([RewardFunction(preds, timeout_s=timeout_s)]) as executor:
        assert executor.score(columns).answers == {"preds": ["0", "1.5", None, None, "['a', 2]", "3", None]}
    columns = {"completions": ["a", "bb", "ccc"], "ground_truth": ["", "", ""], "prompts": [""] * 3}
    with RewardExecutor([RewardFunction(fails_often, on_error="skip", max_error_rate=1.0)]) as executor:
        assert executor.score(columns).answers == {"fails_often": [None, "2", None]}


def test_verls_functions_of_a_batch():
    result = scores(compute_score_batched)
    assert result.rewards["compute_score_batched"].tolist() == [1, 0]
    assert result.metrics["reward_compute_score_batched/length"] == (17.0, 2.0)


# -- TRL ---------------------------------------------------------------------------------------------------------------


def accuracy_reward(completions: list[list[dict[str, str]]], ground_truth: list[str], **kwargs) -> list[float | None]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(text.endswith(truth)) for text, truth in zip(contents, ground_truth, strict=True)]


def think_format_reward(completions, **kwargs):
    assert set(kwargs) >= {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric", "level"}
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    matches = [re.match(pattern, completion[0]["content"], re.DOTALL) for completion in completions]
    return [1.0 if match else 0.0 for match in matches]


async def judged_elsewhere(prompts, completions, level, **kwargs):
    async def one(number):
        await asyncio.sleep(0.05)
        return None if number == 1 else number / 2

    return await asyncio.gather(*[one(number) for number in level])


def that_logs(completions, log_metric, log_extra, trainer_state):
    log_metric("fraction", torch.tensor(0.25))
    log_extra("extracted", ["no", "number"])
    log_extra("length", [len(text) for text in completions])
    return [float(trainer_state.global_step), float(trainer_state.max_steps)]


def test_trls_functions_receive_messages_with_the_option():
    assert rewards(accuracy_reward, messages=True) == [1, 0]
    assert rewards(think_format_reward, {**OFFERED, "completions": ["<think>a</think> b", "b"]}, messages=True) == [
        1,
        0,
    ]


def test_user_messages_are_read_from_the_data_or_made_of_the_prompt():
    conversations = [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], []]
    seen = []

    def spy(prompts, completions):
        seen.append((prompts, completions))
        return [0.0, 0.0]

    scores(spy, {**OFFERED, "messages": conversations}, messages=True)
    responses = [[{"role": "assistant", "content": text}] for text in OFFERED["completions"]]
    assert seen == [([conversations[0], [{"role": "user", "content": "2+2?"}]], responses)]


def test_reading_messages_from_text_raises_an_error_with_the_option():
    with pytest.raises(RuntimeError, match=r"raised TypeError: .* seems to expect chat messages: set messages: true"):
        rewards(accuracy_reward)


def reads_another_text_by_name(completions, ground_truth):
    return [float(truth["final"] in text) for text, truth in zip(completions, ground_truth, strict=True)]


def test_messages_option_is_not_suggested_if_another_text_is_indexed():
    with pytest.raises(RuntimeError, match="raised TypeError: string indices must be integers") as caught:
        rewards(reads_another_text_by_name)
    assert "messages: true" not in str(caught.value)


def test_trls_async_functions_receive_the_whole_batch():
    assert rewards(judged_elsewhere) == [None, 1]


def test_numbers_logged_by_a_function_become_means():
    result = scores(that_logs)
    assert result.rewards["that_logs"].tolist() == [7, 100]
    assert result.metrics["reward_that_logs/fraction"] == (0.25, 1.0)
    assert result.metrics["reward_that_logs/length"] == (12.0, 2.0)
    assert "reward_that_logs/extracted" not in result.metrics


def test_logged_number_cannot_have_a_reserved_name():
    def function(completions, log_metric):
        log_metric("errors", 1.0)

    with pytest.raises(RuntimeError, match="'function' logs a number as 'errors', which is a built-in metric"):
        rewards(function)


# -- OpenRLHF ----------------------------------------------------------------------------------------------------------


def reward_func(queries, prompts, labels, **kwargs):
    assert not kwargs
    assert [query.startswith(prompt) for query, prompt in zip(queries, prompts, strict=True)] == [True, True]
    reward = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
    return {"rewards": reward, "scores": reward.clamp(0, 1), "extra_logs": {"dummy": reward * 2, "one": 1.0}}


def test_openrlhfs_functions():
    result = scores(reward_func)
    assert result.rewards["reward_func"].tolist() == [1, 0]
    assert result.metrics["reward_reward_func/dummy"] == (2.0, 2.0)
    assert result.metrics["reward_reward_func/scores"] == (1.0, 2.0)
    assert result.metrics["reward_reward_func/one"] == (1.0, 1.0)
    assert rewards(lambda queries, labels: torch.tensor([1.0, 2.0])) == [1, 2]


# -- all ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (gsm8k, VERL), (math_dapo, VERL), (default_compute_score, VERL), (compute_score_async, VERL),
        (compute_score_batched, VERL_BATCH), (accuracy_reward, OURS), (judged_elsewhere, OURS),
        (reward_func, OPENRLHF), (lambda prompts, labels: [], OURS),
    ],
)  # fmt: skip
def test_convention_is_recognised_by_the_parameters(function, convention):
    assert RewardFunction(function).convention is convention
    assert RewardFunction(function).is_async == (function in (compute_score_async, judged_elsewhere))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (gsm8k, "'gsm8k' needs 'ground_truth', but the data has only ['prompts', 'completions', 'completion_ids', "
         "'finished', 'end_tokens', 'answer']; it reads the column 'ground_truth': map yours with columns: "
         "{ground_truth: <yours>}"),
        (compute_score_batched, "needs 'data_sources', but the data has only "),
        (reward_func, "needs 'labels', but the data has only "),
        (accuracy_reward, "needs 'ground_truth', but a rollout provides only ['prompts', "),
        (lambda completions, answers: [], "needs 'answers', but a rollout provides only "),
        (lambda completions, solution: [], "; the data has 'answer': map it with columns: {solution: answer}"),
    ],
)  # fmt: skip
def test_missing_column_raises_an_error_with_the_parameter_s_name(function, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RewardFunction(function, name="gsm8k").check(["answer"])


@pytest.mark.parametrize("function", [gsm8k, compute_score_async, accuracy_reward, reward_func, that_logs])
def test_available_columns_pass_the_check(function):
    RewardFunction(function).check(["ground_truth", "data_source"])


class Judge:
    """A class with arguments, specified by name."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, completions):
        return [self.bonus for _ in completions]


class AsyncJudge(Judge):
    per_sample = True

    async def __call__(self, completions, ground_truth):
        assert len(completions) == 1
        return [self.bonus * int(ground_truth[0])]


@pytest.mark.slow
def test_class_is_instantiated_with_the_arguments():
    assert rewards(f"{__file__}:Judge", arguments={"bonus": 3.0}) == [3, 3]
    assert rewards(f"{__file__}:AsyncJudge", arguments={"bonus": 3.0}) == [6, 12]
    assert rewards(f"{__file__}:Judge", arguments={"bonus": 3.0}, timeout_s=30.0) == [3, 3]
    assert rewards(Judge(2.0), timeout_s=30.0) == [2, 2]
    assert list(scores(f"{__file__}:Judge", arguments={"bonus": 1.0}).rewards) == ["Judge"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be positive or null, got 0"),
        ({"max_error_rate": 1.5}, r"max_error_rate must lie in \[0, 1\], got 1.5"),
        ({"timeout_s": 1, "per_sample": False}, "timeout_s applies to single completions"),
        ({"function": "nowhere.py:f"}, "file not found: nowhere.py"),
    ],
)
def test_invalid_options_raise_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        RewardFunction(**{"function": gsm8k, **options})


def test_async_function_is_cancelled_at_its_time_limit():
    ended = []

    async def slow(solution_str):
        try:
            await asyncio.sleep(1000 if solution_str == "slow" else 0)
        except asyncio.CancelledError:
            ended.append(solution_str)
            raise
        return 1.0

    texts = {"prompts": ["p"] * 3, "completions": ["a", "slow", "b"]}
    assert rewards(slow, texts, timeout_s=0.3, on_error="zero") == [1, 0, 1]
    assert ended == ["slow"]


@pytest.mark.slow
def test_async_function_that_blocks_the_loop_is_abandoned():
    async def blocks(solution_str):
        if solution_str == "slow":
            time.sleep(4)
        return 1.0

    began = time.monotonic()
    texts = {"prompts": ["p"] * 2, "completions": ["a", "slow"]}
    # The first call may have finished, but the blocked loop cannot report it.
    assert rewards(blocks, texts, timeout_s=0.3, on_error="zero", max_error_rate=1.0)[1] == 0
    assert time.monotonic() - began < 3
    with pytest.raises(RuntimeError, match=r"'blocks' took longer than its timeout_s of 0.3 s"):
        rewards(blocks, texts, timeout_s=0.3)


def test_traceback_of_a_failing_async_function_is_its_own():
    async def faulty(completions):
        raise KeyError("level")

    with pytest.raises(RuntimeError, match="'faulty' raised KeyError: 'level'") as caught:
        rewards(faulty)
    assert isinstance(caught.value.__cause__, KeyError)
