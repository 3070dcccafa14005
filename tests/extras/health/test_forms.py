"""The form of responses: their length, markup and repetition, and prompts whose responses have one form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.extras.health.forms import form_metrics


def row(response, reward=0.0, group=0, tokens=1, **further):
    return {"prompt": f"question {group}", "response": response, "reward": reward, "group": group,
            "response_tokens": tokens, **further}  # fmt: skip


def test_correlation_is_over_the_responses_to_each_prompt():
    """Deviations of rewards are -1, 1 and -2, 2, of lengths -1, 1 and 1, -1: -2 / sqrt(10 * 4) = -0.316."""
    rows = [row("", 0, 0, tokens=1), row("", 2, 0, tokens=3), row("", 10, 1, tokens=9), row("", 14, 1, tokens=7)]
    assert form_metrics(rows)["form/length_correlation"] == pytest.approx(-2 / math.sqrt(40))


def test_correlation_of_single_responses_is_over_the_step():
    rows = [row("", reward, group, tokens=tokens) for group, (reward, tokens) in enumerate([(0, 1), (1, 2), (2, 3)])]
    assert form_metrics(rows)["form/length_correlation"] == pytest.approx(1)


def test_responses_that_were_cut_or_have_no_reward_do_not_correlate():
    rows = [row("", 0, tokens=1), row("", 1, tokens=2)]
    cut = row("", 0, tokens=9, truncated=True)
    assert form_metrics([*rows, cut, row("", math.nan, tokens=9)])["form/length_correlation"] == pytest.approx(1)


@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (1, 1, 1), (math.nan,) * 3])
def test_equal_rewards_have_no_correlation(rewards):
    rows = [row("", reward, tokens=tokens) for tokens, reward in enumerate(rewards)]
    assert math.isnan(form_metrics(rows)["form/length_correlation"])


def test_markup_counts_headings_items_bold_code_tags_and_boxes():
    text = "# Title\n- one\n2. two\n**bold** and 3 * 4 * 5\n```\n```\n<think>x</think> \\boxed{4}"
    assert form_metrics([row(text), row("no markup - a < b, 2.5")])["form/markup_mean"] == 9 / 2


def test_repetition_is_the_fraction_of_pieces_that_occur_before():
    """Of 16 characters with a period of 4, four of the nine pieces of 8 are new; a text without repeats has none."""
    rows = [row("abcd" * 4), row("abcdefghijklmnop"), row("short")]
    assert form_metrics(rows)["form/repetition_mean"] == pytest.approx(5 / 9 / 3)


def test_prompts_with_one_text_opening_or_template_are_counted():
    opening = "The answer to this question is as follows: "
    rows = [
        *(row(text, group=0) for text in ("4", "4")),
        *(row(opening + text, group=1) for text in ("four", "five")),
        *(row(f"The question has {number} parts", group=2) for number in (12, 7)),
        *(row(text, group=3) for text in ("one", "two")),
        row("alone", group=4),
    ]
    fractions = {name: value for name, value in form_metrics(rows).items() if "same" in name}
    assert fractions == {
        "form/same_text_fraction": 1 / 4,
        "form/same_opening_fraction": 2 / 4,
        "form/same_template_fraction": 2 / 4,
    }


def test_common_text_needs_four_prompts():
    rows = [row(text, group=group) for group, text in enumerate(["", "", "yes", ""])]
    assert form_metrics(rows)["form/common_text_fraction"] == 3 / 4
    assert math.isnan(form_metrics(rows[:3])["form/common_text_fraction"])


def test_form_of_a_conversation_is_that_of_the_policys_turns():
    turns = [{"from": "policy", "text": "**a**"}, {"from": "environment", "text": "**b**"}]
    assert form_metrics([row("**a****b**", segments=turns)])["form/markup_mean"] == 1


@given(st.randoms(), st.floats(0.01, 100), st.floats(-10, 10))
def test_form_does_not_depend_on_order_and_scale_of_rewards(shuffler, scale, shift):
    rows = [row("ab" * (i % 5) + str(i % 3), float(i % 4), i // 4, tokens=1 + i % 7) for i in range(20)]
    others = [{**each, "reward": scale * each["reward"] + shift} for each in rows]
    shuffler.shuffle(others)
    assert form_metrics(others) == pytest.approx(form_metrics(rows), nan_ok=True)
