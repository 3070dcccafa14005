"""Rows that are too long are rejected, dropped or cut as configured, and always counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from tests.data.rows_given import error_of, first_batch, module_of
from tests.helpers import properties
from tests.stand_ins import each


@pytest.mark.parametrize(("too_long", "expected"), [("cut_start", "efgh"), ("cut_end", "abcd"), ("cut_middle", "abgh")])
def test_prompt_is_cut_and_rewards_receive_the_text_that_the_model_reads(too_long, expected):
    module = module_of(PromptDataModule, {"prompt": "abcdefgh"}, {"prompt": "abc"}, max_tokens=4, too_long=too_long)
    (first, _), batch = module.examples["train"], first_batch(module)
    assert (each(batch, "text"), module.tokenizer.decode(batch.prompts[0].token_ids)) == (
        [expected],
        expected,
    )
    assert first.text == expected
    assert str(module.reports["train"]) == (
        f"train data: 2 rows read, 2 kept; cut 1: the prompt to 4 tokens ({too_long})"
    )


def test_cut_with_an_odd_limit_keeps_one_more_token_at_the_beginning():
    assert cut("abcdefgh", 3, "cut_middle") == list("abcgh")


@properties
@given(st.lists(st.integers()), st.data(), st.sampled_from(["cut_start", "cut_end", "cut_middle"]))
def test_cut_keeps_both_ends_in_order(items, data, too_long):
    excess = data.draw(st.integers(0, len(items)))
    saved = cut(items, excess, too_long)
    assert len(saved) == len(items) - excess
    assert any(saved == items[:head] + items[head + excess :] for head in range(len(saved) + 1))
    head = {"cut_start": 0, "cut_end": len(saved), "cut_middle": (len(saved) + 1) // 2}[too_long]
    assert saved == items[:head] + items[head + excess :]


@pytest.mark.parametrize(
    ("too_long", "text", "learnt"),
    [("cut_start", "efxyz</s>", "xyz</s>"), ("cut_end", "abcdef", ""), ("cut_middle", "abcyz</s>", "yz</s>")],
)
def test_text_is_cut_with_its_mask(too_long, text, learnt):
    row = {"prompt": "abcdef", "completion": "xyz"}
    if not learnt:
        output = error_of(ConversationDataModule, row, max_tokens=6, too_long=too_long)
        assert "the text has 10 tokens; cutting it to 6 leaves no token of the answer" in output
        return
    module = module_of(ConversationDataModule, row, max_tokens=6, too_long=too_long)
    batch = first_batch(module)
    assert module.tokenizer.decode(batch.input_ids[0]) == text
    assert module.tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]]) == learnt


def test_first_token_of_the_remaining_text_is_never_trained_on():
    row = {"prompt": "a", "completion": "uvwxyz"}
    batch = first_batch(module_of(ConversationDataModule, row, max_tokens=3, too_long="cut_start"))
    assert batch.loss_mask.tolist() == [[False, True, True]]


def test_dropped_rows_are_not_bad_rows(tmp_path):
    rows = [{"prompt": "a", "completion": "b" * n} for n in (1, 20, 30, 2)]
    path = tmp_path / "deep" / "bad.jsonl"
    module = module_of(ConversationDataModule, *rows, max_tokens=10, too_long="drop", bad_rows=str(path))
    report = module.reports["train"]
    assert str(report) == "train data: 4 rows read, 2 kept; dropped 2: the text longer than 10 tokens"
    assert report.bad == 0
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    assert notes == [
        {"where": "given:2", "why": "the text has 22 tokens, the limit is 10", "row": rows[1]},
        {"where": "given:3", "why": "the text has 32 tokens, the limit is 10", "row": rows[2]},
    ]


def test_only_bad_rows_end_a_run_and_dropped_ones_do_not(tmp_path):
    rows = [{"prompt": "a", "completion": "b" * 20}, {"prompt": "", "completion": "b"}, {"prompt": "a"}]
    path = str(tmp_path / "bad.jsonl")
    output = error_of(ConversationDataModule, *rows, max_tokens=10, too_long="drop", bad_rows=path)
    assert output.startswith("train data: 2 of 3 rows cannot be used (set on_bad_row: skip to skip them):\n  given:2: ")
    assert output.endswith(f"\n  {path} lists all of them")


def test_too_long_rows_end_a_run_and_the_error_lists_the_options():
    long, empty = {"prompt": "a", "completion": "b" * 20}, {"prompt": "", "completion": "b"}
    output = error_of(ConversationDataModule, long, long, empty, max_tokens=10)
    assert output.splitlines()[-1].strip() == (
        "to use longer rows, raise max_tokens; to skip them, set too_long: drop; "
        "to cut them, set too_long: cut_start, cut_middle or cut_end"
    )
    assert output.count("max_tokens") == 1
    assert "max_tokens" not in error_of(ConversationDataModule, empty, max_tokens=10)


def test_file_of_bad_rows_holds_only_those_of_the_current_run(tmp_path):
    path = tmp_path / "bad.jsonl"
    good = {"prompt": "a", "completion": "b"}
    for _ in range(2):
        module_of(ConversationDataModule, good, {}, val=[good, {"prompt": 3}], on_bad_row="skip", bad_rows=str(path))
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [{}, {"prompt": 3}]


PAIR = {"prompt": "abcdef", "chosen": "uvwxy", "rejected": "z"}


@pytest.mark.parametrize(
    ("too_long", "chosen", "rejected"),
    [
        ("cut_start", "efuvwxy</s>", "efz</s>"),
        ("cut_middle", "afuvwxy</s>", "afz</s>"),
        ("cut_end", "abcdefuv", "abcdefz</s>"),
    ],
)
def test_both_texts_of_a_pair_keep_the_same_prompt(too_long, chosen, rejected):
    module = module_of(PreferenceDataModule, PAIR, max_tokens=8, too_long=too_long)
    batch = first_batch(module)
    for side, expected in ((batch.chosen, chosen), (batch.rejected, rejected)):
        assert module.tokenizer.decode(side.input_ids[0]) == expected
        learnt = module.tokenizer.decode(side.input_ids[0][side.loss_mask[0]])
        assert expected.endswith(learnt)
        assert learnt.startswith(("u", "z"))
    assert module.reports["train"].cut.total() == 1


def test_pair_with_different_answer_starts_is_cut_only_in_the_common_prompt():
    hi, hm = ({"role": "user", "content": text} for text in ("hi", "hm"))
    yes, no = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    row = {"chosen": [hi, yes], "rejected": [hi, hm, no]}
    module = module_of(PreferenceDataModule, row, chat=True, max_tokens=30, too_long="cut_middle")
    batch = first_batch(module)
    decoded = [module.tokenizer.decode(side.input_ids[0]) for side in (batch.chosen, batch.rejected)]
    assert decoded == ["user: hisistant: yes|</s>", "user: hier: hm|assistant: no|</s>"]
    assert module.tokenizer.decode(batch.chosen.input_ids[0][batch.chosen.loss_mask[0]]) == " yes|</s>"
    assert module.tokenizer.decode(batch.rejected.input_ids[0][batch.rejected.loss_mask[0]]) == " no|</s>"


def test_cut_pair_counts_once_and_unused_pair_does_not_count():
    pair = {"prompt": "abc", "chosen": "uvwxy", "rejected": "zzzzz"}
    rows = [pair, {**pair, "margin": "x"}]
    report = module_of(PreferenceDataModule, *rows, max_tokens=6, too_long="cut_end", on_bad_row="skip").reports[
        "train"
    ]
    assert report.cut == {"a text to 6 tokens (cut_end)": 1}


def test_pair_with_equal_texts_after_the_cut_is_rejected():
    output = error_of(
        PreferenceDataModule,
        {"prompt": "abc", "chosen": "uvwxy", "rejected": "uvwzz"},
        max_tokens=6,
        too_long="cut_end",
    )
    assert "given:1: chosen and rejected have the same tokens" in output


def test_prompt_too_short_for_the_cut_of_its_pair_is_rejected():
    output = error_of(PreferenceDataModule, PAIR, max_tokens=5, too_long="cut_start")
    assert "a text has 12 tokens; cutting its prompt of 6 is not enough for 5" in output
    output = error_of(PreferenceDataModule, PAIR, max_tokens=6, too_long="cut_end")
    assert "a text has 12 tokens; cutting it to 6 leaves no token of the answer" in output
