"""``lightning-rlhf check-data``: reads the data of a run and reports their interpretation, without building a model."""

import copy
import json
import sys
import warnings
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Literal

import pytest
import yaml
from transformers import AutoTokenizer

from lightning_rlhf import __main__
from lightning_rlhf.extras.commands import check_data as command

CHARACTERS = "abcdefghijklmnopqrstuvwxyz?!:| \n"
TOKENIZER = {
    "class_path": "lightning_rlhf.data.tokenizers.CharacterTokenizer",
    "init_args": {"characters": CHARACTERS},
}
NOTHING = MappingProxyType({})
# The module that the rows of a data module are for, where it is not that of the configuration.
MODULES = {
    "lightning_rlhf.ConversationDataModule": "lightning_rlhf.SFTModule",
    "lightning_rlhf.PreferenceDataModule": "lightning_rlhf.DPOModule",
    "lightning_rlhf.UnpairedDataModule": "lightning_rlhf.KTOModule",
    "lightning_rlhf.RankingDataModule": "lightning_rlhf.RankingRewardModule",
}


def needs_level(completions, level):
    return [0.0] * len(completions)


@pytest.fixture
def check_data(config, tmp_path, capsys):
    """Run ``check-data`` with a configuration and the given rows as data."""

    def check_data(
        *arguments,
        inputs=None,
        rows=None,
        rewards=None,
        architecture=NOTHING,
        loop=NOTHING,
        module=None,
        minibatch=2,
        **data,
    ):
        inputs = copy.deepcopy(inputs or config)
        inputs["model"]["init_args"]["minibatch_size"] = minibatch
        instance = inputs["data"]["init_args"]
        if rows is not None:
            path = tmp_path / "x.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            instance |= {"train": str(path), "tokenizer": TOKENIZER, "batch_size": 2}
            inputs["model"]["init_args"]["actor"]["init_args"]["architecture"] |= {"vocab_size": 36} | architecture
        if rewards is not None:
            inputs["trainer"]["callbacks"][0]["init_args"]["rewards"] = rewards
        inputs["trainer"]["callbacks"][0]["init_args"] |= loop
        inputs["data"]["class_path"] = kind = data.pop("kind", inputs["data"]["class_path"])
        if module or (module := MODULES.get(kind)):
            actor = inputs["model"]["init_args"]["actor"]
            role = "reward_model" if module.endswith("RewardModule") else "actor"
            inputs["model"] = {"class_path": module, "init_args": {role: actor}}
        instance |= data
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump(inputs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what Python does outside of tests
            try:
                code = command.run(["--config", str(path), *arguments])
            except SystemExit as end:
                code = end.code
        shown = capsys.readouterr()
        return SimpleNamespace(code=code, out=shown.out, err=shown.err)

    return check_data


PROMPTS = [{"question": "why?", "answer": "so"}, {"question": "how do you do?", "answer": "fine\nand you?"}]


def test_prompts_are_shown_with_recognized_columns_and_a_sample(check_data):
    exact = [{"function": "lightning_rlhf.tasks.addition.exact"}]
    long = {"max_response_tokens": 20}
    result = check_data(rows=PROMPTS, columns={"prompt": "question"}, rewards=exact, loop=long)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "PromptDataModule",
        "",
        "train: 2 rows read, 2 kept",
        "  columns: 2 rows: prompt <- question (text), ground_truth <- answer (text)",
        "  tokens: least 4, 5 % 4.5, median 9, 95 % 13.5, most 14, all 18",
        "  tokens of the correct answers, without the end token: median 7.5, most 13",
        "  most frequent correct answer: 'so', 0.500 of the rows",
        "  batches of an epoch: 1",
        "  first prompt, 4 tokens:",
        "    | why?",
        "    answer = so",
        "    ground_truth = so",
        "",
        "reward functions whose columns are all there: exact",
        "  exact of the correct answers as responses: 1, of empty responses: 0",
        "",
        "actor: 36 tokens, 64 positions",
        "critic: 36 tokens, 64 positions",
        "",
        "the data can be used",
    ]


def test_answers_that_are_longer_than_a_response_are_a_warning(check_data):
    result = check_data(rows=PROMPTS, columns={"prompt": "question"}, loop={"max_response_tokens": 13})
    assert "warning: 1 of 2 correct answers do not fit into max_response_tokens 13: the longest has 14" in result.out


def equals_list(completions, ground_truth):
    return [float(text == answer) for text, answer in zip(completions, ground_truth, strict=True)]


def equals_joined_list(completions, ground_truth):
    return [float(text == ", ".join(answer)) for text, answer in zip(completions, ground_truth, strict=True)]


def fails_for_a_list(completions, ground_truth):
    if any(text.startswith("a") for text in completions):
        raise ZeroDivisionError("no letters")
    return [0.0] * len(completions)


ASCII = {
    "class_path": "lightning_rlhf.data.tokenizers.CharacterTokenizer",
    "init_args": {"characters": "".join(map(chr, range(32, 127)))},
}
LISTS = [{"question": "which?", "answer": ["a", "b"]}, {"question": "why?", "answer": ["b", "c"]}]


def test_reward_that_compares_a_list_with_a_text_is_a_warning(check_data):
    inputs = {"rows": LISTS, "columns": {"prompt": "question"}, "tokenizer": ASCII, "architecture": {"vocab_size": 100}}
    result = check_data(**inputs, rewards=[{"function": f"{__file__}:equals_list"}])
    assert result.code == 0
    assert (
        "warning: reward function 'equals_list' gives the correct answers of the first rows, written as responses, no "
        "larger reward than empty responses (0). ground_truth is a list, such as ['a', 'b']"
    ) in result.out
    result = check_data(**inputs, rewards=[{"function": f"{__file__}:equals_joined_list"}])
    assert "warning" not in result.out
    assert "  equals_joined_list of the correct answers as responses: 1, of empty responses: 0" in result.out


def shorter(completions, **kwargs):
    return [-float(len(text)) for text in completions]


def test_reward_that_does_not_read_the_answer_is_not_compared_with_it(check_data):
    inputs = {"rows": LISTS, "columns": {"prompt": "question"}, "tokenizer": ASCII, "architecture": {"vocab_size": 100}}
    result = check_data(**inputs, rewards=[{"function": f"{__file__}:shorter"}])
    assert result.code == 0
    assert "correct answers as responses" not in result.out
    assert "warning" not in result.out


def test_reward_that_fails_for_a_correct_answer_is_an_error(check_data):
    inputs = {"rows": LISTS, "columns": {"prompt": "question"}, "tokenizer": ASCII, "architecture": {"vocab_size": 100}}
    result = check_data(**inputs, rewards=[{"function": f"{__file__}:fails_for_a_list"}])
    assert result.code == 2
    assert "no letters" in result.err
    assert "called before the run with correct answers as responses" in result.err


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("answer", [7, 7.5, True, {"b": 1}])
def test_answers_of_other_types_are_tried_as_texts(check_data, answer):
    rows = [{"question": "which?", "answer": answer}] * 2
    wide = {"columns": {"prompt": "question"}, "tokenizer": ASCII, "architecture": {"vocab_size": 100}}
    result = check_data(rows=rows, rewards=[{"function": f"{__file__}:equals_text"}], **wide)
    assert "warning: reward function" not in result.out
    result = check_data(rows=rows, rewards=[{"function": f"{__file__}:equals_list"}], **wide)
    assert "warning: reward function 'equals_list' gives the correct answers" in result.out


def equals_text(completions, ground_truth):
    return [float(text == str(answer)) for text, answer in zip(completions, ground_truth, strict=True)]


def of_messages(prompts, completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]


def test_size_and_reward_errors_equal_those_of_fit(check_data):
    inputs = {"rows": PROMPTS, "columns": {"prompt": "question"}}
    result = check_data(**inputs, minibatch=4)
    assert result.code == 2
    message = "minibatch_size 4 does not divide the 2 responses of a step (2 prompts x group_size 1): "
    message += "set model.init_args.minibatch_size to 2"
    assert result.err == f"lightning-rlhf: {message}\n"
    rewards = [{"function": f"{__file__}:of_messages"}]
    result = check_data(**inputs, rewards=rewards)
    assert result.code == 2
    assert "it seems to expect chat messages: set messages: true" in result.err
    assert check_data(**inputs, rewards=[{**rewards[0], "messages": True}]).code == 0


def needs_an_answer(completions, answer):
    return [0.0] * len(completions)


def test_rows_without_a_column_of_a_reward_are_reported_with_their_line_as_in_fit(check_data):
    rows = [{"question": ""}, *PROMPTS, {"question": "who?"}, {"question": "why?", "answer": None}]
    rewards = [{"function": f"{__file__}:needs_an_answer"}]
    inputs = {"rows": rows, "columns": {"prompt": "question"}, "on_bad_row": "skip"}
    result = check_data(**inputs, rewards=rewards, loop={"max_response_tokens": 20})
    message = result.out.split("\n\n")[2]
    assert message.startswith(
        "warning: 2 of 4 rows of the train data have no 'answer', which reward needs_an_answer needs"
    )
    assert message.endswith("/x.jsonl:4")
    assert "reward functions whose columns are all there" not in result.out
    assert (result.code, result.err) == (0, "")
    long = {"max_response_tokens": 20}
    assert json.loads(check_data("--json", **inputs, rewards=rewards, loop=long).out)["warnings"] == [
        message.removeprefix("warning: ")
    ]


def breaks_without_an_answer(completions, answer):
    return [float(text in each) for each, text in zip(answer, completions, strict=True)]


def test_reward_that_breaks_at_a_row_without_a_column_names_that_row(check_data):
    rows = [{"question": "who?", "answer": "me"}, {"question": "why?"}]
    rewards = [{"function": f"{__file__}:breaks_without_an_answer"}]
    result = check_data(rows=rows, columns={"prompt": "question"}, rewards=rewards, loop={"max_response_tokens": 20})
    assert result.code == 2
    assert "1 of 2 rows of the train data have no 'answer', which reward breaks_without_an_answer needs" in result.err


def test_trained_parts_of_texts_are_shown(check_data, config):
    rows = [{"prompt": "who?", "completion": " me"}, {"prompt": "a", "completion": "b"}]
    result = check_data(rows=rows, kind="lightning_rlhf.ConversationDataModule", rewards=[])
    assert result.code == 0
    assert "  first text, 8 tokens, 4 of them trained on:\n    | who?⟦ me</s>⟧" in result.out


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        (
            "lightning_rlhf.PreferenceDataModule",
            {"prompt": "who?", "chosen": "me", "rejected": "you"},
            [
                "  first chosen, 7 tokens, 3 of them trained on:",
                "    | who?⟦me</s>⟧",
                "  first rejected, 8 tokens, 4 of them trained on:",
                "    | who?⟦you</s>⟧",
            ],
        ),
        (
            "lightning_rlhf.UnpairedDataModule",
            {"prompt": "who?", "completion": "me", "label": False},
            ["  first undesirable text, 7 tokens, 3 of them trained on:", "    | who?⟦me</s>⟧"],
        ),
        (
            "lightning_rlhf.RankingDataModule",
            {"prompt": "who?", "answers": [{"answer": "me", "rank": 2}, {"answer": "you", "rank": 1}]},
            [
                "  first answer of rank 1, 8 tokens, 4 of them trained on:",
                "    | who?⟦you</s>⟧",
                "  first answer of rank 2, 7 tokens, 3 of them trained on:",
                "    | who?⟦me</s>⟧",
            ],
        ),
    ],
)
def test_pairs_and_unpaired_texts_are_shown(check_data, kind, row, expected):
    result = check_data(rows=[row, row], kind=kind, rewards=[])
    assert result.code == 0
    assert "\n".join(expected) in result.out


def test_bad_rows_are_counted_by_reason_and_exit_with_code_2_unless_skipped(check_data):
    rows = [{"prompt": "why?"}, {"prompt": None}, {"prompt": "how?"}, {"prompt": ""}, {"prompt": "a" * 30}, {}]
    result = check_data(rows=rows, rewards=[])
    assert result.code == 2
    assert "train: 6 rows read, 2 kept" in result.out
    for reason in ("column 'prompt' holds null", "column 'prompt' is empty", "the prompt longer than 16 tokens"):
        assert f"  dropped: 1 row: {reason}" in result.out
    assert "train data: 4 of 6 rows cannot be used" in result.err
    assert "x.jsonl:2: column 'prompt' holds null, expected text" in result.err
    skipped = check_data(rows=rows, rewards=[], on_bad_row="skip")
    assert (skipped.code, skipped.err, skipped.out) == (0, "", f"{result.out}\nthe data can be used\n")


def test_custom_data_module_is_reported_by_its_class(check_data):
    result = check_data(
        rows=PROMPTS, rewards=[], kind="lightning_rlhf.PreferenceDataModule", module="lightning_rlhf.SFTModule"
    )
    assert result.code == 2
    assert "cannot train on the rows of PreferenceDataModule: use ConversationDataModule as data module" in result.err
    assert "column" not in result.err


@pytest.mark.slow
def test_intentionally_cut_or_dropped_rows_are_not_errors(check_data):
    rows = [{"prompt": "a" * 30}, {"prompt": "why?"}, {"prompt": "how?"}]
    cut = check_data(rows=rows, rewards=[], too_long="cut_end")
    assert cut.code == 0
    assert "  cut: 1 row: the prompt to 16 tokens (cut_end)" in cut.out
    dropped = check_data(rows=rows, rewards=[], too_long="drop")
    assert dropped.code == 0
    assert "  dropped: 1 row: the prompt longer than 16 tokens" in dropped.out


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"train": "nothing.jsonl"}, "no data at 'nothing.jsonl'"),
        ({"tokenizer": "./nothing"}, "no tokenizer at './nothing'"),
        ({"batch_size": 3}, "batch_size is 3, but the training data have only 2 usable rows"),
        ({"rewards": [{"function": "tests.extras.commands.test_check_data.needs_level"}]}, "'level'"),
        ({"columns": {}}, "no column 'prompt', only ['answer', 'question']"),
        ({"tokenzier": "x"}, "did you mean 'tokenizer'?"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"bad_rows": "."}, "bad_rows '.' cannot be written: Is a directory"),
        ({"rewards": [{"function": "tests.extras.commands.test_check_data.nothing"}]}, "'nothing' was not found in"),
    ],
)
def test_errors_that_would_end_a_run_are_one_line_with_code_2(check_data, change, output):
    inputs = {"rows": PROMPTS, "columns": {"prompt": "question"}, "rewards": []}
    result = check_data(**inputs | change)
    assert result.code == 2
    assert output in result.err
    assert "Traceback" not in result.err


def test_ambiguous_columns_are_reported_with_the_option_that_resolves_them(check_data):
    rows = [{"prompt": "why?", "answer": "so", "solution": "no"}] * 2
    result = check_data(rows=rows, rewards=[])
    assert result.code == 2
    assert "x.jsonl:1: both 'answer' and 'solution' could be the ground_truth" in result.err
    assert "'columns: {ground_truth: answer}'" in result.err
    assert check_data(rows=rows, rewards=[], columns={"ground_truth": "answer"}).code == 0


def test_json_output_has_the_same_content(check_data):
    result = check_data("--json", rows=PROMPTS, columns={"prompt": "question"})
    message = json.loads(result.out)
    assert result.code == 0
    assert message["module"] == "PromptDataModule"
    assert message["rewards"] == ["exact"]
    train = message["data"]["train"]
    assert (train["read"], train["kept"], train["dropped"], train["batches"]) == (2, 2, {}, 1)
    assert train["tokens"] == {"least": 4, "5 %": 4.5, "median": 9, "95 %": 13.5, "most": 14, "all": 18}
    sample = {"text": "why?", "tokens": 4, "trained": 0, "columns": {"answer": "so", "ground_truth": "so"}}
    assert train["sample"] == {"prompt": sample}


# -- the data and the models -------------------------------------------------------------------------------------------


def test_model_with_a_smaller_vocabulary_than_the_tokenizer_is_an_error(check_data):
    result = check_data(rows=PROMPTS, columns={"prompt": "question"}, architecture={"vocab_size": 20})
    assert result.code == 2
    assert "the tokenizer has 36 tokens, the actor only 20: use the tokenizer that belongs to the actor" in result.err


def test_unknown_characters_are_counted_with_examples_and_are_not_an_error(check_data):
    rows = [{"prompt": "naïve café?"}, {"prompt": "why?"}, {"prompt": "à la café"}]
    result = check_data(rows=rows, rewards=[])
    assert result.code == 0
    assert "  the tokenizer does not know 4 parts of the texts in 2 of 3 rows: 'é' 2, 'ï' 1, 'à' 1" in result.out
    assert "does not know" not in check_data(rows=rows[1:2] * 2, rewards=[]).out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "kind", "loop", "message"),
    [
        (
            [{"prompt": "a" * 10}, {"prompt": "b"}],
            "lightning_rlhf.PromptDataModule",
            {"max_response_tokens": 60},
            "the longest prompt has 10 tokens and a response up to 60 (max_response_tokens), 70 together, and the "
            "actor accepts at most 64 (max_position_embeddings): set max_response_tokens: 54 or less",
        ),
        (
            [{"prompt": "a" * 64}, {"prompt": "b"}],
            "lightning_rlhf.PromptDataModule",
            {},
            "the longest prompt has 64 tokens and a response up to 4 (max_response_tokens), 68 together, and the actor "
            "accepts at most 64 (max_position_embeddings): under data.init_args set max_tokens: 63 with too_long: drop",
        ),
    ],
)
def test_texts_longer_than_the_positions_of_the_model_are_an_error_as_in_fit(
    check_data, fit, config, tmp_path, rows, kind, loop, message
):
    actual = check_data(rows=rows, rewards=[], kind=kind, loop=loop, max_tokens=100)
    assert actual.code == 2
    assert f"lightning-rlhf: {message}" in actual.err
    inputs = yaml.safe_load((tmp_path / "x.yaml").read_text())
    inputs["trainer"]["callbacks"][0]["init_args"]["rewards"] = [{"function": "lightning_rlhf.tasks.addition.exact"}]
    for row in rows:
        row["answer"] = "so"
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs["model"]["init_args"]["minibatch_size"] = 2
    result = fit(inputs)
    assert result.code == 2
    assert result.err.startswith(f"lightning-rlhf: {message}")


def test_length_of_a_pair_is_that_of_its_longer_text(check_data):
    row = {"prompt": "a" * 30, "chosen": "b" * 30, "rejected": "c" * 10}
    kind = "lightning_rlhf.PreferenceDataModule"
    fits = check_data(rows=[row, row], kind=kind, rewards=[], loop={"max_response_tokens": 3}, max_tokens=100)
    assert fits.code == 0, fits.err
    result = check_data(rows=[{**row, "chosen": "b" * 60}] * 2, kind=kind, rewards=[], max_tokens=100)
    assert (result.code, "the longest prompt has 91 tokens" in result.err) == (2, True)


def test_missing_model_is_not_an_error_of_the_data(check_data, config, tmp_path):
    config["model"]["init_args"]["actor"] = "runs/later/export"
    path = tmp_path / "only.yaml"
    path.write_text(yaml.safe_dump(config))
    result = check_data(inputs=config)
    assert (result.code, result.err) == (0, "")
    assert "actor: not compared with the data, because there is no model at 'runs/later/export'" in result.out


@pytest.mark.slow
def test_model_path_is_checked_without_loading_weights(check_data, config, tiny_export, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "empty" / name).write_bytes((tiny_export / name).read_bytes())
    (tmp_path / "empty/model.safetensors").write_text("no weights at all")
    config["model"]["init_args"]["actor"] = str(tmp_path / "empty")
    result = check_data(inputs=config, tokenizer=str(tmp_path / "empty"), loop={"max_response_tokens": 300})
    assert result.code == 2
    assert "the actor accepts at most 256 (max_position_embeddings)" in result.err
    other = check_data(inputs=config)
    assert "the actor was trained with another tokenizer" in other.err


def test_options_of_fit_change_the_checked_data(check_data):
    result = check_data("--data.init_args.batch_size", "6", "--data.init_args.val", json.dumps({
        "class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": 5, "held_out": True}
    }))  # fmt: skip
    assert result.code == 0
    assert "batches of an epoch: 2" in result.out
    assert "val: 5 rows read, 5 kept" in result.out


def test_help_is_short_and_refers_to_the_rest(capsys):
    for arguments in (["--help"], ["-h", "--config", "none.yaml"]):
        assert command.run(arguments) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("usage: lightning-rlhf check-data --config x.yaml [--json]")
        assert "lightning-rlhf fit --help" in shown
        assert len(shown.splitlines()) < 20


def test_check_data_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-rlhf", "check-data", "--help"])
    assert __main__.main() == 0
    assert "the trained part in" in capsys.readouterr().out


QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart"


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reward", "sft"))])
def test_quickstart_data_are_understood(name, capsys):
    path = QUICKSTART / f"{name}.yaml"
    tokenizer = {**TOKENIZER, "init_args": {"characters": "0123456789+=: "}}
    code = command.run(["--config", str(path), "--data.init_args.tokenizer", json.dumps(tokenizer)])
    assert (code, capsys.readouterr().err) == (0, "")


@pytest.mark.slow
def test_unused_chat_template_for_text_columns_is_a_warning(check_data, tiny_export):
    texts = check_data(rows=[{"prompt": "who?"}], tokenizer=str(tiny_export))
    assert "warning: the tokenizer has a chat template, but text columns do not use it" in texts.out
    messages = [{"prompt": [{"role": "user", "content": "who?"}]}]
    assert "chat template, but" not in check_data(rows=messages, tokenizer=str(tiny_export)).out


ECHO = {"factory": "tests.environments.worlds:Echo", "bridge": "plain", "max_turns": 2, "timeout_s": None}


def test_conversation_with_the_environment_is_shown_with_its_trained_parts(check_data):
    result = check_data(loop={"environment": ECHO})
    assert result.code == 0
    assert "a conversation whose turns are '0'; it ended with max_turns:" in result.out
    assert "\u27e60</s>\u27e70\u27e60</s>\u27e7" in result.out
    assert "rewards of its turns: 0, 0" in result.out
    failing = ECHO | {"factory": "tests.environments.worlds:Misbehaves"}
    assert (
        "environment tests.environments.worlds:Misbehaves raised KeyError"
        in check_data(loop={"environment": failing}).err
    )


CALLS = {
    "factory": "lightning_rlhf.environments.Tools",
    "arguments": {
        "functions": ["tests.extras.commands.test_check_data:repeat", "tests.extras.commands.test_check_data:count"]
    },
    "parser": {"class_path": "lightning_rlhf.environments.JSONToolCalls", "init_args": {"start": "<", "end": ">"}},
    "bridge": "plain",
    "timeout_s": None,
}


def repeat(text: str, times: int, loud: bool) -> str:
    """Repeat a text.

    Args:
        text: text
        times: number of times
        loud: whether to shout
    """
    return f"{text * times} É" if loud else text


def count(word: Literal["ab", "c"]) -> int:
    """Count letters.

    Args:
        word: word
    """
    return len(word)


def test_tools_are_called_with_generated_arguments_and_unknown_characters_are_counted(check_data):
    rows = [{"prompt": "who?", "answer": "a"}] * 2
    tokenizer = {**TOKENIZER, "init_args": {"characters": CHARACTERS + '<>{}",01_'}}
    result = check_data(
        rows=rows, rewards=[], loop={"environment": CALLS}, tokenizer=tokenizer, architecture={"vocab_size": 99}
    )
    assert result.err == ""
    assert "a conversation whose turns are a call of each tool, then '0'; it ended with done:" in result.out
    assert '\u27e6<{"name": "repeat", "arguments": {"text": "1", "times": 1, "loud": true}}></s>\u27e71' in result.out
    assert '\u27e6<{"name": "count", "arguments": {"word": "ab"}}></s>\u27e7' in result.out
    assert "the tokenizer does not know parts of the environment's texts: 'É' 1, '2' 1" in result.out


def test_val_metric_that_is_not_a_reward_is_an_error(check_data):
    result = check_data(loop={"val_metric": "wrong"})
    assert result.code == 2
    assert "val_metric must be the name of a reward, one of ['" in result.err
    alone = check_data(rewards=[], loop={"val_metric": "wrong", "environment": ECHO})
    assert "val_metric must be the name of a reward, one of ['environment'], got 'wrong'" in alone.err


@pytest.mark.slow
def test_template_that_omits_tools_is_a_warning(check_data, tiny_export, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "who?"}]}]
    result = check_data(
        rows=rows, tokenizer=str(tiny_export), tools=["tests.extras.commands.test_check_data:count"], max_tokens=64
    )
    assert "warning: the chat template does not render tools, so no prompt describes count: describe" in result.out
    plain = check_data(rows=rows, tokenizer=str(tiny_export), max_tokens=64)
    assert "does not render tools" not in plain.out


def test_template_that_ends_turns_with_another_token_is_a_warning(check_data, tiny_export, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_export)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end = tokenizer.convert_tokens_to_ids("<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '<end>' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "other")
    options = {"tokenizer": str(tmp_path / "other"), "max_tokens": 64}
    rows = [{"prompt": [{"role": "user", "content": "who?"}]}]
    result = check_data(rows=rows, **options)
    assert f"warning: the chat template ends a message of the assistant with '<end>' (id {end}), but" in result.out
    assert f"set stop_token_ids: [{end}] in RolloutLoop" in result.out
    assert "ends a message" not in check_data(rows=rows, loop={"stop_token_ids": [end]}, **options).out
    assert "ends a message" not in check_data(rows=[{"prompt": "who?"}], **options).out  # no template is used


@pytest.mark.parametrize("loop", [{"rewards": None}, {"rewards": []}])
def test_run_without_any_reward_is_a_warning(check_data, loop):
    result = check_data(loop=loop | {"val_metric": None})
    assert result.code == 0  # the data can be used
    assert "fit will end: no reward is configured: set RolloutLoop.rewards, RolloutLoop.environment" in result.out


@pytest.mark.parametrize("needed", [{"environment": ECHO}, {}])
def test_run_whose_rewards_come_from_elsewhere_needs_none(check_data, config, needed):
    inputs = copy.deepcopy(config)
    if not needed:
        inputs["model"]["init_args"]["reward_model"] = inputs["model"]["init_args"]["actor"]
    assert "no reward" not in check_data(inputs=inputs, loop={"rewards": None, "val_metric": None, **needed}).out
