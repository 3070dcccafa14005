"""The tables of options are complete, and name options that exist here."""

from pathlib import Path

import pytest

from lightning_rlhf.extras.migration import verl
from lightning_rlhf.extras.migration.parts import OWNERS, PARTS, SECTIONS, table
from lightning_rlhf.extras.migration.trl import SECTIONS_OF, counterpart
from lightning_rlhf.extras.schema.known import find
from tests import migration_page

LISTS = Path(__file__).parent


def names_of(file):
    lines = (LISTS / file).read_text().splitlines()
    entries = (line.partition(": ") for line in lines if line and line[0] != "#")
    return {section: names.split() for section, _, names in entries}


TRL = names_of("trl_options.txt")


def test_lists_have_the_options_of_today():
    assert {section: len(names) for section, names in TRL.items()} == {
        "TrainingArguments": 112, "ModelConfig": 19, "ScriptArguments": 6, "SFTConfig": 22, "DPOConfig": 26,
        "KTOConfig": 19, "RewardConfig": 12, "GRPOConfig": 79, "RLOOConfig": 53,
    }  # fmt: skip


@pytest.mark.parametrize("section", TRL)
def test_every_option_of_trl_has_a_counterpart_or_a_reason(section):
    trainer = next((name for name, sections in SECTIONS_OF.items() if sections[0] == section), "grpo")
    missing = [name for name in TRL[section] if counterpart(trainer, name) is None]
    assert missing == []


VERL = names_of("verl_options.txt")


@pytest.mark.parametrize("section", VERL)
def test_every_option_of_verl_has_a_counterpart_or_a_reason(section):
    assert [name for name in VERL[section] if verl.counterpart(f"{section}.{name}") is None] == []


def test_list_of_verl_has_the_options_of_today():
    assert sum(map(len, VERL.values())) == 300


@pytest.mark.parametrize(
    ("program", "number"), [("openrlhf", 402), ("axolotl", 598), ("llamafactory", 235), ("swift", 419)]
)
def test_every_option_of_other_programs_has_a_counterpart_or_a_reason(program, number):
    names = names_of(f"{program}_options.txt")
    known = table(program)
    shared = known.get("common", {})
    assert sum(map(len, names.values())) == number
    missing = [
        f"{section}.{name}"
        for section, options in names.items()
        for name in options
        if name not in known.get(section, {}) and name not in shared
    ]
    assert missing == []


@pytest.mark.parametrize("program", ["trl", "verl", *migration_page.OTHERS])
def test_every_target_exists(program):
    for section, options in table(program).items():
        for name, entry in options.items():
            where = f"{section}.{name}"
            if not entry.option:
                assert entry.words, where
                continue
            if entry.option in SECTIONS:
                continue
            owner = OWNERS.get(f"{entry.part}.{entry.option}", PARTS[entry.part][0])
            kind = find(owner) if owner else None
            if owner.startswith("torch."):
                assert entry.option in {"lr", "betas", "eps", "weight_decay"}, where
            elif owner:
                assert kind is not None, owner
                assert entry.option in kind.options, where


def test_page_is_that_of_the_tables():
    for file, text in migration_page.pages().items():
        assert file.read_text() == text, f"run python -m tests.migration_page ({file.name})"
