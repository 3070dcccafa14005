"""Rankings: forms of answers and their ranks, ties, prompts, and rows that cannot be used."""

import pytest

from lightning_rlhf import RankingDataModule
from tests.data.rows_given import GivenRows, Letters, error_of, first_batch, module_of

ROW = {"prompt": "who?", "responses": ["me", "you", "we"], "ranks": [2, 1, 3]}
USER, ME, YOU = ({"role": role, "content": text} for role, text in
                 (("user", "who?"), ("assistant", "me"), ("assistant", "you")))  # fmt: skip


def read(*rows, **options):
    """Return the answers of the first row, the best first, with their ranks."""
    module = module_of(RankingDataModule, *rows, **options)
    batch = first_batch(module)
    texts = [module.tokenizer.decode(ids[mask][:-1]) for ids, mask in
             zip(batch.input_ids[0], batch.loss_mask[0], strict=True)]  # fmt: skip
    return list(zip(texts, batch.ranks[0].tolist(), strict=True))


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"prompt": "who?", "completions": ["me", "you", "we"], "scores": [0.5, 7, -1]},
        {"instruction": "who?", "generations": ["me", "you", "we"], "ratings": [3, 4, 2]},  # distilabel
        {"prompt": "who?", "answers": [{"answer": a, "rank": float(r), "model": "m"} for a, r in
                                       (("me", 2), ("you", 1), ("we", 3))], "turns": 1},  # Nectar
        {"instruction": "who?", "completions": [{"response": a, "overall_score": s, "critique": "so"} for a, s in
                                                (("me", 6.5), ("you", 8.5), ("we", 3))], "model": "UltraFeedback"},
        {"prompt": "who?", "responses": '["me", "you", "we"]', "ranks": "[0, -1, 5]"},  # as in CSV files
    ],
)  # fmt: skip
def test_forms_of_answers_and_ranks_are_read(row):
    assert read(row) == [("you", 1), ("me", 2), ("we", 3)]


def test_prompt_and_answer_are_one_text_whose_answer_is_marked():
    module = module_of(RankingDataModule, ROW, {**ROW, "responses": ["a", "b"], "ranks": [1, 2]}, batch_size=2)
    batch = first_batch(module)
    assert batch.ranks.tolist() == [[1, 2, 3], [1, 2, 0]]
    assert batch.lengths.tolist() == [[8, 7, 7], [6, 6, 0]]
    assert module.tokenizer.decode(batch.texts.input_ids[0][:7]) == "who?you"
    assert batch.loss_mask[0, 0].tolist() == [False] * 4 + [True] * 4
    assert not batch.loss_mask[1, 2].any()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([1, 1, 2], [("me", 1), ("you", 1), ("we", 2)]), ([9, 3, 9], [("you", 1), ("me", 2), ("we", 2)])],
)
def test_ties_keep_their_ranks_and_are_counted(ranks, expected):
    rows = [{**ROW, "ranks": ranks}, ROW]
    assert read(*rows) == expected
    module = module_of(RankingDataModule, *rows)
    (note,) = module.reports["train"].describe_notes()
    assert note.endswith("are tied: they are not compared with each other (1 of 2 rows)")


@pytest.mark.parametrize(
    "answers",
    [
        [[ME], [YOU]],
        [ME, YOU],
        [[USER, ME], [USER, YOU]],
        [{"response": [ME]}, {"response": [YOU]}],
    ],
)
def test_answers_can_be_messages_or_conversations(answers):
    row = {"prompt": [USER], "responses": answers, "scores": [1, 2]}
    module = module_of(RankingDataModule, row, chat=True)
    batch = first_batch(module)
    assert module.tokenizer.decode(batch.texts.input_ids[1][: batch.lengths[0, 1] - 2]) == "user: who?|assistant: me"
    assert module.reports["train"].has_messages


def test_what_all_conversations_begin_with_is_the_prompt():
    more = [USER, ME, {"role": "user", "content": "and?"}]
    row = {"responses": [[*more, ME], [*more, YOU]], "ranks": [2, 1]}
    module = module_of(RankingDataModule, row, chat=True)
    batch = first_batch(module)
    texts = [module.tokenizer.decode(ids[mask]) for ids, mask in
             zip(batch.texts.input_ids, batch.texts.loss_mask, strict=True)]  # fmt: skip
    assert texts == [" you|</s>", " me|</s>"]  # not the assistant's turn within the prompt


def test_text_becomes_messages():
    assert read(ROW, chat=True, as_messages=True)[0] == (" you|", 1)
    nectar = {"prompt": "\n\nHuman: who?\n\nAssistant: ", "answers": ROW["responses"], "ranks": ROW["ranks"]}
    markers = {"user": "\n\nHuman:", "assistant": "\n\nAssistant:"}
    assert read(nectar, chat=True, as_messages=markers)[0] == (" you|", 1)
    whole = {"responses": [f"\n\nHuman: who?\n\nAssistant: {answer}" for answer in ("me", "you")], "ranks": [2, 1]}
    assert read(whole, chat=True, as_messages=markers)[0] == (" you|", 1)


def test_prompt_can_be_split_off():
    row = {"responses": ["who?:me", "who?:you"], "ranks": [2, 1]}
    assert read(row, split_after=":") == [("you", 1), ("me", 2)]


def test_key_of_the_score_can_be_chosen():
    answers = [{"response": "me", "score": 1, "aspects": {"style": {"Rating": "3"}}},
               {"response": "you", "score": 2, "aspects": {"style": {"Rating": "1"}}}]  # fmt: skip
    row = {"prompt": "who?", "responses": answers}
    assert [text for text, _ in read(row)] == ["you", "me"]
    assert [text for text, _ in read(row, answer_score="aspects.style.Rating")] == ["me", "you"]
    assert [text for text, _ in read(row, answer_rank="score")] == ["me", "you"]
    with pytest.raises(ValueError, match="set only one"):
        RankingDataModule(GivenRows(()), Letters(), answer_rank="a", answer_score="b")


def test_unread_columns_and_keys_of_answers_are_reported():
    answers = [{"response": "me", "rank": 1, "model": "m"}, {"response": "you", "rank": 2, "critique": None}]
    module = module_of(RankingDataModule, {"prompt": "who?", "completions": answers, "source": "x"})
    assert set(module.reports["train"].unread) == {"source", "completions.model"}
    assert list(module.reports["train"].column_mappings) == ["prompt <- prompt (text), responses <- completions (list)"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"responses": ["me"], "ranks": [1]}, "a ranking needs at least 2 answers, got 1"),
        ({"ranks": [1, 2]}, "column 'ranks' has 2 values for 3 answers"),
        ({"ranks": [1, 1, 1]}, "all 3 answers are tied"),
        ({"ranks": [1, None, 2]}, "ranks of answer 2 is None, expected a finite number"),
        ({"ranks": [1, "N/A", 2]}, "ranks of answer 2 is 'N/A', expected a finite number"),
        ({"ranks": [1, True, 2]}, "ranks of answer 2 is True"),
        ({"ranks": [1, float("nan"), 2]}, "ranks of answer 2 is nan"),
        ({"ranks": None}, "column 'ranks' holds null, expected a list"),
        ({"ranks": 3}, "column 'ranks' holds int, expected a list"),
        ({"responses": "me"}, "column 'responses' holds str, expected a list"),
        ({"responses": "[me"}, "column 'responses' holds a text that is no JSON list"),
        ({"responses": ["me", "you", "me"]}, "answers of ranks 2 and 3 have the same tokens"),
        ({"responses": ["me", "", "we"]}, "column 'responses[1]' is empty"),
        ({"responses": ["me", None, "we"]}, "column 'responses[1]' holds null, expected text"),
        ({"responses": ["me", {"n": 1}, "we"]}, "an answer that is an object needs its text in one of response"),
        (
            {"responses": ["me", {"text": "a", "answer": "b"}, "we"]},
            "an answer that is an object needs its text in one",
        ),
        ({"responses": ["me", [YOU], "we"]}, "some answers are messages and others are text"),
        ({"responses": [{"text": "a", "rank": 1}, "b", "c"]}, "each answer has its 'rank', but the column 'ranks'"),
        ({"prompt": None}, "the row has no prompt"),
    ],
)
def test_rows_that_cannot_be_used_say_why(change, reason):
    assert f"given:1: {reason}" in error_of(RankingDataModule, {**ROW, **change})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "who?", "ranks": [1, 2]}, "no column 'responses'"),
        ({"prompt": "who?", "responses": ["a", "b"], "ranking": [1, 2]}, "the answers have no ranks: add a column"),
        ({"question": "who?", "responses": ["a", "b"], "ranks": [1, 2]}, "to use 'question', set data.init_args"),
        ({**ROW, "scores": [1, 2, 3]}, "both 'ranks' and 'scores' could be the ranks"),
        ({"prompt": "a", "responses": [{"text": "a", "score": 1, "rating": 2}] * 2}, "score and rating: choose one by"),
    ],
)  # fmt: skip
def test_missing_and_ambiguous_columns_are_named(row, reason):
    assert reason in error_of(RankingDataModule, row)


def test_long_rows_lose_the_start_of_their_shared_prompt():
    row = {**ROW, "prompt": "abcdefgh"}
    assert "a text has 12 tokens, the limit is 9" in error_of(RankingDataModule, row, max_tokens=9)
    module = module_of(RankingDataModule, row, max_tokens=9, too_long="cut_start")
    batch = first_batch(module)
    assert [module.tokenizer.decode(ids[:5]) for ids in batch.texts.input_ids] == ["defgh"] * 3
    assert batch.lengths.tolist() == [[9, 8, 8]]
    assert "cutting its prompt of 8" in error_of(RankingDataModule, row, max_tokens=3, too_long="cut_start")
    assert "no token of the answer" in error_of(RankingDataModule, row, max_tokens=8, too_long="cut_end")
