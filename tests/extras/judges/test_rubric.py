"""Rubrics: their files, what is not allowed in them, and the weighted mean."""

import json
import math
import random

import pytest

from lightning_rlhf.extras.judges.rubric import Criterion, Rubric, Scale

FILE = """
instructions: The reader is a child.
scale: {lowest: 0, highest: 1}
criteria:
  - name: accuracy
    question: Is every statement correct?
    weight: 3
    scale: {lowest: 1, highest: 5}
    meanings: {1: nothing is correct, 5: all is correct}
  - name: brevity
    question: Does it have at most two sentences?
"""
RUBRIC = Rubric(
    [
        Criterion(
            "accuracy",
            "Is every statement correct?",
            3,
            Scale(1, 5),
            {1: "nothing is correct", 5: "all is correct"},
        ),
        Criterion("brevity", "Does it have at most two sentences?"),
    ],
    "The reader is a child.",
    Scale(0, 1),
)


def read(tmp_path, text, name="rubric.yaml"):
    (tmp_path / name).write_text(text)
    return Rubric.read(tmp_path / name)


def test_yaml_json_and_python_give_the_same_rubric(tmp_path):
    assert read(tmp_path, FILE) == RUBRIC
    content = {
        "instructions": RUBRIC.instructions,
        "scale": {"lowest": 0, "highest": 1},
        "criteria": [
            {"name": "accuracy", "question": "Is every statement correct?", "weight": 3, "scale": {"lowest": 1}},
            {"name": "brevity", "question": "Does it have at most two sentences?"},
        ],
    }
    from_json = read(tmp_path, json.dumps(content), "rubric.json")
    assert [each.scale for each in from_json.criteria] == [Scale(1, 5), Scale(0, 1)]
    assert [each.weight for each in from_json.criteria] == [3, 1]


def test_parts_of_a_file_may_refer_to_others(tmp_path):
    rubric = read(
        tmp_path,
        "criteria:\n"
        "  - &first {name: a, question: b, scale: &scale {lowest: 0, highest: 9}}\n"
        "  - {<<: *first, name: c, weight: 2}\n"
        "scale: *scale\n",
    )
    scale = Scale(0, 9)
    assert rubric == Rubric([Criterion("a", "b", 1, scale), Criterion("c", "b", 2, scale)], scale=scale)


def test_weighted_mean_of_grades_by_hand():
    """Grades 4 of 1 to 5 and 1 of 0 to 1 are 0.75 and 1; (3 x 0.75 + 1 x 1) / 4 = 0.8125."""
    accuracy, brevity = RUBRIC.criteria
    fractions = {"accuracy": accuracy.scale.fraction(4), "brevity": brevity.scale.fraction(1)}
    assert fractions == {"accuracy": 0.75, "brevity": 1.0}
    assert RUBRIC.reward(fractions) == 0.8125
    assert RUBRIC.only("brevity").reward({"brevity": 0.0}) == 0.0


def test_weighted_mean_equals_a_loop_and_keeps_its_properties():
    draw = random.Random(0)
    for _ in range(50):
        weights = [draw.choice([0.0, 0.5, 1.0, 7.0]) for _ in range(4)] + [1.0]
        rubric = Rubric([Criterion(f"c{i}", "?", weight) for i, weight in enumerate(weights)])
        fractions = {f"c{i}": draw.random() for i in range(5)}
        total = divisor = 0.0
        for i, weight in enumerate(weights):
            total += weight * fractions[f"c{i}"]
            divisor += weight
        reward = rubric.reward(fractions)
        assert reward == pytest.approx(total / divisor, abs=1e-12)
        assert min(fractions.values()) <= reward <= max(fractions.values())
        doubled = Rubric([Criterion(f"c{i}", "?", 2 * weight) for i, weight in enumerate(weights)])
        assert doubled.reward(fractions) == pytest.approx(reward, abs=1e-12)
        assert rubric.reward(dict.fromkeys(fractions, 0.25)) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(
    ("scale", "grade", "fraction"),
    [
        (Scale(), 1, 0.0),
        (Scale(), 5, 1.0),
        (Scale(), 2.0, 0.25),
        (Scale(), 2.5, None),
        (Scale(), 0, None),
        (Scale(), 6, None),
        (Scale(), math.nan, None),
        (Scale(), math.inf, None),
        (Scale(0, 1, 0.1), 0.3, 0.3),
        (Scale(0, 1, 0.1), 0.35, None),
        (Scale(0, 10, None), 3.3, 0.33),
        (Scale(-2, 2, 2), -2, 0.0),
    ],
)
def test_grade_is_a_fraction_of_its_scale_or_not_on_it(scale, grade, fraction):
    assert scale.fraction(grade) == pytest.approx(fraction)


def test_schema_lists_the_grades_of_a_scale():
    assert Scale().schema == {"enum": [1, 2, 3, 4, 5]}
    assert Scale(0, 1, 0.25).schema == {"enum": [0, 0.25, 0.5, 0.75, 1]}
    assert Scale(0, 1, None).schema == {"type": "number", "minimum": 0, "maximum": 1}
    assert Scale(0, 1000).schema == {"type": "number", "minimum": 0, "maximum": 1000}


ONE = "criteria: [{name: a, question: b%s}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the rubric must have the keys criteria, got None"),
        ("criteria: []", "needs at least one criterion, got none"),
        ("criteria: {a: b}", "criteria must be a list, got {'a': 'b'}"),
        ("criteria: [a]", "criterion 1 must have the keys name, question, got 'a'"),
        ("criterion: []", "the rubric has the key 'criterion', but allowed are .*; did you mean 'criteria'"),
        ("scale: {lowest: 1}", "the rubric has no criteria"),
        (ONE % ", wght: 2", "criterion 1 has the key 'wght', but allowed are .*; did you mean 'weight'"),
        (ONE % ", weight: 0", "must have a positive sum, got 0"),
        (ONE % ", weight: -1", "weight of criterion a must be a number of at least 0, got -1"),
        (ONE % ", weight: .nan", "weight of criterion a must be a number of at least 0, got nan"),
        (ONE % ", weight: '2'", "weight of criterion a must be a number of at least 0, got '2'"),
        (ONE % ", weight: true", "weight of criterion a must be a number of at least 0, got True"),
        (ONE % ", weight: 1, weight: 2", "the key 'weight' occurs twice in the part that begins at line 1"),
        (ONE % ", scale: {lowest: 5, highest: 1}", "got lowest 5 and highest 1: swap them"),
        (ONE % ", scale: {lowest: 1, highest: 1}", "got lowest 1 and highest 1"),
        (ONE % ", scale: {highest: many}", "highest of a scale must be a number, got 'many'"),
        (ONE % ", scale: {step: 3}", "must divide the distance from 1 to 5, got 3"),
        (ONE % ", scale: {step: 0}", "must divide the distance from 1 to 5, got 0"),
        (
            ONE % ", scale: {max: 3}",
            "the scale of criterion 1 has the key 'max', but allowed are lowest, highest, step",
        ),
        (ONE % ", scale: 5", "the scale of criterion 1 must have the keys lowest, highest, step, got 5"),
        (ONE % ", meanings: {6: good}", "has a meaning of the grade 6, but grades are a whole number from 1 to 5"),
        (ONE % ", meanings: good", "meanings of criterion a must be texts by grade, got 'good'"),
        ("criteria: [{name: a}]", "criterion 1 has no question"),
        ("criteria: [{name: a, question: ' '}]", "criterion a needs a question for the judge, got ' '"),
        ("criteria: [{name: a b, question: c}]", "name of a criterion must begin with a letter, .* got 'a b'"),
        ("criteria: [{name: yes, question: c}]", "name of a criterion must begin with a letter, .* got True"),
        ("criteria: [{name: errors, question: c}]", "be no metric of the reward .*, got 'errors'"),
        ("criteria: [{name: a, question: b}, {name: a, question: c}]", "two criteria have the name 'a'"),
        ("criteria: [{name: a, question: b}]\nshows_answer: 1", "shows_answer true or false, got '' and 1"),
        ("criteria: [", "is not valid YAML"),
        ("criteria: !!python/object/apply:os.system [ls]", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_invalid_rubric_is_one_line_with_the_file(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"rubric.yaml.*{message}") as raised:
        read(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_missing_rubric_names_a_similar_file(tmp_path):
    (tmp_path / "rubric.yaml").write_text(FILE)
    with pytest.raises(FileNotFoundError, match=r"no rubric at .*did you mean .*rubric\.yaml"):
        Rubric.read(tmp_path / "rubrik.yaml")


def test_unknown_criterion_is_an_error_with_those_of_the_rubric():
    with pytest.raises(ValueError, match="no criterion 'style'; it has accuracy, brevity"):
        RUBRIC.only("style")
