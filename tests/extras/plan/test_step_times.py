"""The tables of docs/five_hundred_gpus.md are the output of the code, and its sentences fit them."""

from pathlib import Path

import pytest

from benchmarks import step_times
from benchmarks.step_times import TABLES, times

PAGE = Path(__file__).resolve().parents[3] / "docs/five_hundred_gpus.md"


def test_page_has_the_generated_tables():
    text = PAGE.read_text()
    assert step_times.with_tables(text) == text


def test_page_without_a_marker_raises():
    with pytest.raises(ValueError, match="must contain <!-- table: 7B, same step --> and <!-- end --> once, got 0"):
        step_times.with_tables("# From one GPU")


def test_generation_of_the_longest_response_does_not_get_faster():
    few, many = (times(TABLES["7B, same step"], gpus) for gpus in (8, 512))
    assert many.generation == few.generation
    assert many.update < few.update / 50
    assert many.generation / many.step > 0.9


def test_a_step_that_grows_takes_as_long_and_larger_engines_are_faster():
    few, many = (times(TABLES["7B, larger step"], gpus) for gpus in (8, 512))
    assert many.step == pytest.approx(few.step, rel=0.01)
    setting = TABLES["7B, same step"]
    assert times(setting._replace(tensor_parallel=8), 512).step < times(setting, 512).step / 5


def test_step_is_generation_push_and_the_larger_of_learning_and_what_is_sent():
    each = step_times.Times(generation=1.0, push=0.5, evaluation=2.0, update=3.0, sent=7.0, gib=1.0)
    assert each.step == 8.5
    assert each._replace(sent=4.0).step == 6.5
