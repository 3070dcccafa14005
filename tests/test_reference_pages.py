"""The pages of docs/reference equal the generated ones and contain every public name."""

import re
from collections import Counter

import pytest

import lightning_rlhf
from lightning_rlhf import callbacks

pytest.importorskip("griffe", reason="griffelib is not installed (extra docs)")

from tests.reference_pages import COMMENT, PAGES, Writer


@pytest.fixture(scope="module")
def writer():
    return Writer()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_equal_the_generated_ones(writer, page):
    assert page.read_text() == writer.content(page), "write it: python -m tests.reference_pages"


def test_every_public_name_is_on_a_page():
    named = {path for page in PAGES for path, _ in COMMENT.findall(page.read_text())}
    public = {f"lightning_rlhf.{name}" for name in lightning_rlhf.__all__ if not name.startswith("_")}
    public |= {f"lightning_rlhf.callbacks.{name}" for name in callbacks.__all__}
    assert public - named == set()


def test_links_point_to_exactly_one_heading():
    headings = Counter(
        f"{page.name}#{re.sub(r'[^a-z0-9_]', '', heading.lower())}"
        for page in PAGES
        for heading in re.findall(r"^##+ (.*)$", page.read_text(), re.MULTILINE)
    )
    links = {link for page in PAGES for link in re.findall(r"`\]\(([^)]*)\)", page.read_text())}
    assert len(links) > 30
    assert {link: headings[link] for link in links if headings[link] != 1} == {}


def test_argument_shows_its_type_as_a_link_and_its_default(writer):
    text = writer.documents("lightning_rlhf.callbacks.RolloutLoop", "")
    assert "\n    max_response_tokens: int = 256,\n" in text
    assert "\n| `group_size` | `int` = `1` | responses per prompt, at least 1. |\n" in text
    assert r"| `list[`[`RewardFunction`](rewards.md#rewardfunction)`] \| None` = `None` |" in text


def test_inherited_constructor_is_shown_as_the_signature(writer):
    text = writer.documents("lightning_rlhf.PromptDataModule", "")
    assert "\n    too_long: TooLong = 'bad_row',\n" in text
