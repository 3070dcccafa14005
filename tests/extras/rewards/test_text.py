"""Text rewards: values by hand, SQuAD's rules, and texts built to be slow."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.extras.rewards.text import (
    ExactMatch,
    Format,
    Length,
    TokenF1,
    boxed,
    boxed_format,
    normalized,
    tagged,
    think_answer_format,
)


@pytest.mark.parametrize(
    ("answer", "correct", "exact", "f1"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1, 1),
        ("the eiffel tower in Paris", "Eiffel Tower", 0, 2 * 2 / (4 + 2)),
        ("Paris, Paris", "Paris", 0, 2 * 1 / (2 + 1)),
        ("Denver  Broncos!", "Carolina Panthers", 0, 0),
        ("", "", 1, 1),
        ("the", "a", 1, 1),
        ("", "Paris", 0, 0),
        ("42", 42, 1, 1),
        ("theatre", "the atre", 0, 0),
    ],
)
def test_match_and_f1_of_known_texts(answer, correct, exact, f1):
    assert ExactMatch()([answer], [correct]) == [exact]
    assert TokenF1()([answer], [correct]) == [pytest.approx(f1)]


def test_best_of_several_correct_answers_counts():
    truths = [["Rome", "the city of Rome"], {"target": ["rome"]}, {"target": "ROME"}]
    assert ExactMatch()(["Rome."] * 3, truths) == [1.0] * 3
    assert TokenF1()(["city Rome"], [["Paris", "the city of Rome"]]) == [pytest.approx(2 * 2 / (2 + 3))]


def test_last_complete_tag_contains_the_answer():
    texts = [
        "x <answer>Bern</answer> y",
        "<answer>Rome</answer><answer> Bern </answer>",
        "<answer>Bern</answer><answer>Rome</answer>",
        "Bern",
        "<answer>Bern",
        "</answer>Bern<answer>",
    ]
    assert ExactMatch(tag="answer")(texts, ["bern"] * 6) == [1, 1, 0, 0, 0, 0]


def test_characters_count_without_normalization():
    assert ExactMatch(normalize=False)([" Bern ", "bern", "Bern."], ["Bern"] * 3) == [1.0, 0.0, 0.0]
    assert TokenF1(normalize=False)(["The Bern"], ["the Bern"]) == [0.5]


@pytest.mark.parametrize("truth", [None, [], {"answer": "x"}, [None], [["a"]]])
def test_rows_without_a_correct_answer_raise_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth must be a text, a number or a list of them"):
        ExactMatch()(["x"], [truth])


@given(st.text(), st.text())
def test_f1_is_symmetric_and_one_exactly_for_equal_words(one, other):
    (forward,), (backward,) = TokenF1()([one], [other]), TokenF1()([other], [one])
    assert forward == backward
    assert 0.0 <= forward <= 1.0
    assert (forward == 1.0) == (sorted(normalized(one).split()) == sorted(normalized(other).split()))
    assert ExactMatch()([one], [other])[0] <= forward


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} or \boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1", None),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_boxes_of_known_texts(text, inside):
    assert boxed(text) == inside
    assert boxed_format([text]) == [float(inside is not None)]


def test_empty_box_is_not_an_answer():
    assert boxed_format([r"\boxed{}", r"\boxed{ }"]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "earned"),
    [
        ("<think>why</think><answer>so</answer>", 1),
        (" <think>\nwhy\n</think>\n\n<answer>\nso\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("Well: <think>why</think><answer>so</answer>", 0),
        ("<think>why</think><answer>so</answer> and", 0),
        ("<think>why</think> thus <answer>so</answer>", 0),
        ("<think>why</think><think>again</think><answer>so</answer>", 0),
        ("<answer>so</answer><think>why</think>", 0),
        ("<think>why<answer></think>so</answer>", 0),
        ("<think>why</think><answer>so", 0),
        ("", 0),
    ],
)
def test_formats_of_known_texts(text, earned):
    assert think_answer_format([text]) == [earned]


def test_format_must_match_the_whole_completion():
    assert Format(r"Answer: \d+")(["Answer: 12", " Answer: 12\n", "Answer: 12.", "The Answer: 12"]) == [1, 1, 0, 0]
    assert Format(r"a.b")(["a\nb"]) == [1.0]
    with pytest.raises(ValueError, match=r"format pattern '\(' is not a regular expression"):
        Format("(")


@pytest.mark.parametrize(
    ("reward", "earned"),
    [
        (Length(4, 6), [0, 0, 1, 1, 0, 0]),
        (Length(4, 6, slope=2), [0, 0.5, 1, 1, 0.5, 0]),
        (Length(4, 4, slope=4), [0.5, 0.75, 1, 0.5, 0.25, 0]),
    ],
)
def test_lengths_of_known_texts(reward, earned):
    assert reward([[7] * length for length in (2, 3, 4, 6, 7, 8)]) == earned


@pytest.mark.parametrize("bounds", [(-1, 3, 0), (4, 3, 0), (1, 2, -1)])
def test_invalid_length_ranges_raise_an_error(bounds):
    with pytest.raises(ValueError, match="length needs 0 <= least <= most"):
        Length(*bounds)


@pytest.mark.parametrize("part", ["<answer>", "</answer>", r"\boxed{", "{", "<think>", "a ", "\\", "<answer></answer>"])
def test_text_rewards_are_fast_for_any_text(part):
    text, start = part * 100_000, time.process_time()
    tagged(text, "answer"), boxed(text), think_answer_format([text]), TokenF1("answer")([text], ["x"])
    boxed(r"\boxed{" + text)
    assert time.process_time() - start < 2.0
