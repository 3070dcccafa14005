"""Rewards by rankings of the responses to a prompt."""

import json
import math
import random
import re

import pytest

from lightning_rlhf.extras.judges.ranking_reward import RankingReward, orders_of, ranking_reward
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction


def responses_in(text):
    """Return the responses that a question shows, by their labels."""
    return dict(re.findall(r"^[0-9a-f]{16} response (R\d+)\n(.*)\n[0-9a-f]{16} end of response", text, re.MULTILINE))


def ranked(key):
    """Return a judge that ranks by a key of the response, the largest first."""

    def answer(text):
        shown = responses_in(text)
        return json.dumps({"reason": "so", "ranking": sorted(shown, key=lambda label: key(shown[label]), reverse=True)})

    return answer


def by_position(text):
    return json.dumps({"reason": "so", "ranking": list(responses_in(text))})


def score(reward, prompts, completions, **columns):
    function = RewardFunction(reward, name="rank")
    with RewardExecutor([function]) as executor:
        scored = executor.score({"prompts": list(prompts), "completions": list(completions), **columns})
        function.close()
    return scored.rewards["rank"].tolist(), {name: total / count for name, (total, count) in scored.metrics.items()}


def test_ranks_become_rewards_by_hand():
    assert [ranking_reward(["c", "a", "b"], text) for text in "abc"] == [0.5, 0.0, 1.0]
    assert [ranking_reward(["b", "a"], text) for text in "ab"] == [0.0, 1.0]


def test_rewards_are_ranks_within_each_group(chat):
    stub = chat(ranked(len))
    rewards, metrics = score(RankingReward(stub.judge()), ["p"] * 3 + ["q"] * 2, ["xx", "x", "xxx", "yyyy", "y"])
    assert rewards == [0.5, 0.0, 1.0, 1.0, 0.0]
    assert metrics["reward_rank/agreement"] == 1.0
    assert len(stub.bodies) == 4  # two orders of two groups


def test_equal_responses_get_the_same_reward_and_are_shown_once(chat):
    stub = chat(ranked(len))
    rewards, _ = score(RankingReward(stub.judge(), orders=1), ["p"] * 4, ["xx", "x", "xx", "xxx"])
    assert rewards == [0.5, 0.0, 0.5, 1.0]
    assert [len(responses_in(text)) for text in stub.texts] == [3]
    assert score(RankingReward(stub.judge()), ["p"] * 3, ["x"] * 3)[0] == [0.5] * 3
    assert len(stub.bodies) == 1


def test_prompt_with_one_response_gets_no_reward_and_no_request(chat):
    stub = chat(ranked(len))
    rewards, _ = score(RankingReward(stub.judge()), ["p", "q"], ["x", "xx"])
    assert all(map(math.isnan, rewards))
    assert stub.bodies == []


def test_judge_that_ranks_by_position_gives_equal_rewards_and_no_agreement(chat):
    stub = chat(by_position)
    rewards, metrics = score(RankingReward(stub.judge()), ["p"] * 4, ["a", "bb", "ccc", "dddd"])
    assert rewards == [0.5] * 4
    # Grades 0, 1/3, 2/3, 1 against their reverse: within 2 (1 + 1/9 + 1/9 + 1), of all 2 x 4 x 20/9, times 7.
    assert metrics["reward_rank/agreement"] == pytest.approx(1 - 7 * 2 * (20 / 9) / (16 * 10 / 9))
    assert score(RankingReward(stub.judge(), orders=1), ["p"] * 2, ["a", "b"])[0] in ([0.0, 1.0], [1.0, 0.0])


def test_orders_depend_on_texts_only_and_every_second_one_is_reversed():
    texts = [f"text {number}" for number in range(6)]
    orders = orders_of(texts, 4)
    shuffled = random.Random(0).sample(texts, 6)
    assert orders_of(shuffled, 4) == orders
    assert orders[1] == orders[0][::-1]
    assert orders[3] == orders[2][::-1]
    assert orders[2] not in orders[:2]
    assert all(sorted(order) == sorted(texts) for order in orders)


def test_rewards_have_the_mean_of_one_half_and_follow_a_permutation(chat):
    stub = chat(ranked(lambda text: int(text[1:]) * 2 % 5))
    reward = RankingReward(stub.judge())
    texts = [f"t{number}" for number in range(5)]
    rewards, _ = score(reward, ["p"] * 5, texts)
    assert rewards == [0, 0.5, 1, 0.25, 0.75]
    assert sum(rewards) / 5 == 0.5
    asked = len(stub.bodies)
    order = random.Random(2).sample(range(5), 5)
    again, _ = score(reward, ["p"] * 5, [texts[i] for i in order])
    assert again == [rewards[i] for i in order]
    assert len(stub.bodies) == asked


def test_rankings_of_several_judges_are_averaged(chat):
    longest, shortest = chat(ranked(len)), chat(ranked(lambda text: -len(text)))
    judges = [longest.judge(name="longest"), shortest.judge(name="shortest")]
    rewards, metrics = score(RankingReward(judges), ["p"] * 3, ["x", "xx", "xxx"])
    assert rewards == [0.5] * 3
    assert metrics["reward_rank/agreement"] < 0


UNREADABLE = [
    "R1", '{"ranking": ["R1"]}', '{"ranking": ["R1", "R1"]}', '{"ranking": ["R1", "R2", "R3"]}',
    '{"ranking": "R1, R2"}', '{"ranking": ["R1", "R3"]}', '{"ranking": [1, 2]}', '{"ranking": null}',
    '{"ranking": [["R1"], "R2"]}',
]  # fmt: skip


@pytest.mark.parametrize("answer", UNREADABLE)
def test_answer_that_is_no_ranking_is_an_error(chat, answer):
    stub = chat(lambda text: answer)
    with pytest.raises(
        RuntimeError, match=r'1 of 1 prompts have no ranking.*does not end with {"ranking": .*each of R1, R2 once'
    ):
        score(RankingReward(stub.judge()), ["p"] * 2, ["x", "xx"])


def test_some_unranked_prompts_leave_the_others_their_rewards(chat, caplog):
    good = ranked(len)
    stub = chat(lambda text: "I cannot" if "\nbad\n" in text else good(text))
    columns = (["p"] * 2 + ["bad"] * 2 + ["q"] * 2, ["x", "xx", "y", "yy", "zz", "z"])
    rewards, metrics = score(RankingReward(stub.judge(), max_unranked=0.5), *columns)
    assert [0.0 if math.isnan(value) else value for value in rewards] == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert metrics["reward_rank/unranked"] == pytest.approx(1 / 3)
    assert "1 of 3 prompts have no ranking; the first: the answer of judge judge" in caplog.text
    with pytest.raises(RuntimeError, match=r"1 of 3 prompts have no ranking, more than max_unranked of 0\.3 allows"):
        score(RankingReward(stub.judge(), max_unranked=0.3), *columns)


def test_spent_budget_ends_the_run_or_leaves_out_the_rest(chat):
    stub = chat(ranked(len))
    columns = (["p"] * 2 + ["q"] * 2, ["x", "xx", "y", "yy"])
    limits = {"max_requests": 2, "concurrency": 1}
    with pytest.raises(RuntimeError, match="the budget of 2 requests"):
        score(RankingReward(stub.judge(limits, name="one"), max_unranked=1.0), *columns)
    rewards, metrics = score(RankingReward(stub.judge(limits, name="two"), when_spent="skip"), *columns)
    assert sum(map(math.isnan, rewards)) == 2
    assert metrics["reward_rank/over_budget"] == 0.5


def test_prompts_with_other_images_or_answers_are_other_groups(chat):
    stub = chat(ranked(len))
    reward = RankingReward(stub.judge(), shows_answer=True)
    rewards, _ = score(reward, ["p"] * 4, ["x", "xx", "y", "yy"], ground_truth=["1", "1", "2", "2"])
    assert rewards == [0.0, 1.0, 0.0, 1.0]
    assert {len(responses_in(text)) for text in stub.texts} == {2}
    assert {text.partition("correct answer\n")[2][0] for text in stub.texts} == {"1", "2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"orders": 0}, "orders must be at least 1"), ({"max_unranked": 2}, r"must lie in \[0, 1\]")],
)
def test_invalid_options_are_an_error(chat, options, message):
    with pytest.raises(ValueError, match=message):
        RankingReward(chat(by_position).judge(), **options)
