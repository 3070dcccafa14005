"""The addition task: worked answers are right, mistakes are of documented kinds, held-out problems stay held out."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.tasks.addition import (
    CHARACTERS,
    Demonstrations,
    Preferences,
    Problems,
    exact,
    is_held_out,
    worked_answer,
)
from tests.helpers import properties

NUMBERS = st.integers(0, 999)
STEP = re.compile(r"(\d)\+(\d)\+([01])=(\d\d)")


def rows(source):
    return [row for _, row in source.rows()]


def operands(prompt):
    assert re.fullmatch(r"\d{3}\+\d{3}=", prompt)
    return int(prompt[:3]), int(prompt[4:7])


def carries(answer):
    return [int(carry) for _, _, carry, _ in STEP.findall(answer)]


@properties
@given(NUMBERS, NUMBERS)
def test_worked_answer_and_all_its_steps_are_correct(a, b):
    steps, _, result = worked_answer(a, b).partition(":")
    assert result == (str(a + b) if a + b > 999 else f"{a + b:03d}")
    carry = 0
    for column, step in enumerate(steps.split(" ")):
        x, y, written, total = map(int, STEP.fullmatch(step).groups())
        assert (x, y) == (a // 10**column % 10, b // 10**column % 10)
        assert written == carry
        assert total == x + y + carry
        carry = total // 10
    assert column == 2


def test_worked_answer_of_a_case_by_hand():
    assert worked_answer(457, 368) == "7+8+0=15 5+6+1=12 4+3+1=08:825"
    assert worked_answer(784, 398) == "4+8+0=12 8+9+1=18 7+3+1=11:1182"
    assert worked_answer(457, 368, lambda column, carry: carry == 1) == "7+8+0=15 5+6+0=11 4+3+0=07:715"


def test_all_sums_of_every_digit_pair_and_carry_are_correct():
    for x, y, u, v in itertools.product(range(10), repeat=4):
        a, b = 10 * x + u, 10 * y + v
        assert int(worked_answer(a, b).rpartition(":")[2]) == a + b


def test_one_tenth_is_held_out_and_never_trained_on():
    share = sum(is_held_out(a, b) for a, b in itertools.product(range(0, 1000, 7), range(0, 1000, 11))) / (143 * 91)
    assert abs(share - 0.1) < 0.008  # 0.0026 is one deviation
    for source in (Problems, Demonstrations, Preferences):
        assert not any(is_held_out(*operands(row["prompt"])) for row in rows(source(200)))
        assert all(is_held_out(*operands(row["prompt"])) for row in rows(source(50, held_out=True)))


@pytest.mark.parametrize("source", [Problems, Demonstrations, Preferences])
def test_rows_depend_only_on_the_seed_and_more_rows_start_with_the_same_ones(source):
    assert rows(source(20, seed=3)) == rows(source(40, seed=3))[:20]
    assert rows(source(20, seed=3)) != rows(source(20, seed=4))


def test_three_sources_draw_different_problems():
    prompts = [[row["prompt"] for row in rows(source(50))] for source in (Problems, Demonstrations, Preferences)]
    assert all(one != other for one, other in itertools.combinations(prompts, 2))


def test_problems_have_worked_answers():
    for row in rows(Problems(50)):
        assert row["answer"] == worked_answer(*operands(row["prompt"]))


def test_demonstrators_forget_three_of_five_carries_and_invent_none():
    forgotten, needed = 0, 0
    for row in rows(Demonstrations(1500)):
        for column, (x, y, carry, total) in enumerate(STEP.findall(row["completion"])):
            due = column > 0 and previous >= 10  # noqa: F821
            needed += due
            forgotten += due and carry == "0"
            assert due or carry == "0"
            assert int(total) == int(x) + int(y) + int(carry)
            previous = int(total)  # noqa: F841
    assert abs(forgotten / needed - 0.6) < 0.05


@pytest.mark.parametrize("forget", [0.0, 1.0])
def test_demonstrators_that_never_or_always_forget_carries(forget):
    for row in rows(Demonstrations(50, forget=forget)):
        if forget:
            assert carries(row["completion"]) == [0, 0, 0]
        else:
            assert row["completion"] == worked_answer(*operands(row["prompt"]))


def test_near_miss_is_always_wrong_and_covers_every_kind():
    kinds = {"short": 0, "forgotten": 0, "invented": 0}
    for row in rows(Preferences(400)):
        right, miss = worked_answer(*operands(row["prompt"])), row["rejected"]
        assert row["chosen"] == right
        assert miss != right
        if right.startswith(miss):
            kinds["short"] += 1
        else:
            assert re.fullmatch(r"(\d\+\d\+[01]=\d\d ){2}\d\+\d\+[01]=\d\d:\d{3,4}", miss)
            differ = [w - r for r, w in zip(carries(right), carries(miss), strict=True) if r != w]
            kinds["forgotten" if differ[0] < 0 else "invented"] += 1
    assert min(kinds.values()) > 30


def test_exact_reward_requires_every_character_and_the_end():
    right = worked_answer(457, 368)
    answers = [right, right, right + " ", right[:-1], ""]
    assert exact(answers, [right] * 5, [True, False, True, True, True]) == [1, 0, 0, 0, 0]


def test_quickstart_tokenizer_knows_every_character():
    tokenizer = CharacterTokenizer(CHARACTERS).load()
    for row in rows(Preferences(50)):
        for text in row.values():
            assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]
