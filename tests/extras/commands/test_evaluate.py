"""Statistics of a file of responses, each computed by hand, and errors for invalid files and functions."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlhf.extras.commands import evaluate as command
from lightning_rlhf.extras.commands.scores import ScoredResponses, difference, draw_sizes, statistics
from tests.helpers import assert_close

REWARDS = '''
"""Rewards of a user."""

def right(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def length(completions):
    return [float(len(text)) for text in completions]

def some(completions):
    return [None if text == "?" else 1.0 for text in completions]

def answers(responses):
    return [text if text.isdigit() else None for text in responses]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("a", "b")
    return {"score": 1.0 if solution_str == ground_truth else 0.5, "acc": True}

def ids(completions, completion_ids):
    return [1.0] * len(completions)

def broken(completions):
    raise KeyError("mine")

def nine_tenths(completions):
    return [0.9] * len(completions)

def not_a_number(completions):
    return [float("nan") if text == "?" else 1.0 for text in completions]

def endless(completions):
    return [float("inf")] * len(completions)

def lists(responses):
    return [[text] for text in responses]

def broken_answers(responses):
    raise KeyError("mine")

def too_few(responses):
    return ["1"]

def trl(prompts, completions, **kwargs):
    return [float(p[0]["content"] == "p" and c[0]["content"] == "1") for p, c in zip(prompts, completions)]
'''
ROWS = [
    {"prompt": "p", "answer": "1", "data_source": "a", "responses": ["1", "1", "2", "3"]},
    {"prompt": "p", "answer": "9", "data_source": "a", "responses": ["1", "1", "2", "?"]},
    {"prompt": "p", "answer": "5", "data_source": "b", "responses": ["5", "5", "5", "5"]},
]


OPENRLHF = """
def ends(queries, prompts, labels):
    return [float(query.endswith("</s>")) for query in queries]
"""


def test_queries_of_openrlhf_end_as_in_training(evaluate):
    Path("openrlhf.py").write_text(OPENRLHF)
    code, _, shown = evaluate("--reward", "openrlhf.py:ends")
    assert (code, "needs 'end_tokens', which the file does not have: write it by" in shown) == (2, True)
    rows = [{**row, "end_tokens": ["</s>", "", "", "</s>"]} for row in ROWS]
    code, report, _ = evaluate("--reward", "openrlhf.py:ends", rows=rows)
    assert (code, report["sources"]["all"]["rewards"]["ends"]["mean"]) == (0, 0.5)


@pytest.fixture
def evaluate(capsys):
    """Run the command on rows and return its exit code, its report, and its output."""
    Path("rewards.py").write_text(REWARDS)

    def evaluate(*arguments, rows=ROWS, file="responses.jsonl", others=()):
        if file.endswith(".jsonl") and rows is not None:
            Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        capsys.readouterr()
        try:
            code = command.run([file, *others, "--json", "report.json", *arguments])
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, json.loads(Path("report.json").read_text()) if code == 0 else None, shown.out + shown.err

    return evaluate


def test_all_statistics_equal_values_computed_by_hand(evaluate):
    code, report, shown = evaluate("--reward", "rewards.py:right", "--answer", "rewards.py:answers")
    assert code == 0
    a, b = (report["sources"][name] for name in "ab")
    assert (a["prompts"], a["responses"], b["prompts"], b["responses"]) == (2, 8, 1, 4)
    right = a["rewards"]["right"]
    # Prompts score 1/2 and 0: p = 1/4, s^2 / m = (2/64) / ... = 0.125 / 4, so n = 0.1875 / 0.03125 = 6 trials.
    assert right["mean"] == 0.25
    assert_close([right["low"], right["high"]], [0.05999, 0.63519], rtol=2e-4)
    # C(2, 2) / C(4, 2) = 1/6 of the pairs of the first prompt hold no correct response.
    assert_close(right["pass@1"]["mean"], 1 / 4)
    assert_close(right["pass@2"]["mean"], (5 / 6 + 0) / 2)
    assert_close(right["pass@4"]["mean"], (1 + 0) / 2)
    # Of the six pairs of 1, 1, 2, 3 one agrees on 1, four tie between 1 and another, one has no 1: (1 + 4/2 + 0) / 6.
    assert_close(right["maj@2"]["mean"], (3 / 6 + 0) / 2)
    assert_close(right["maj@4"]["mean"], (1 + 0) / 2)
    assert b["rewards"]["right"]["mean"] == 1
    assert_close(report["sources"]["all"]["rewards"]["right"]["mean"], (1 / 2 + 0 + 1) / 3)
    assert [line.split("│")[1].strip() for line in shown.splitlines() if "│ right" in line] == ["a", "b", "all"]


def test_statistics_that_do_not_apply_are_omitted(evaluate):
    _, report, _ = evaluate("--reward", "rewards.py:some", "--reward", "rewards.py:length")
    result = report["sources"]["a"]["rewards"]
    assert (result["some"]["not_applicable"], result["some"]["mean"]) == (1, 1.0)
    assert result["length"]["mean"] == 1.0
    assert result["some"]["pass@3"]["mean"] == 1.0  # three are left of the second prompt
    assert "pass@4" not in result["some"]


def test_lengths_and_truncation_are_read_from_generate(evaluate):
    message = [{**ROWS[0], "response_tokens": [2, 2, 2, 4], "finish_reasons": ["stop", "stop", "stop", "length"]}]
    _, report, _ = evaluate("--reward", "rewards.py:length", rows=message)
    result = report["sources"]["a"]
    assert (result["response_tokens_mean"], result["truncated_fraction"]) == (2.5, 0.25)
    _, report, _ = evaluate("--reward", "rewards.py:length")
    assert "response_tokens_mean" not in report["sources"]["a"]


def test_result_equals_that_of_verl_main_eval(evaluate):
    from pyarrow import Table, parquet

    rows = [
        {
            "data_source": row["data_source"],
            "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": 0},
            "responses": row["responses"],
        }
        for row in ROWS
    ]
    parquet.write_table(Table.from_pylist(rows), "verl.parquet")
    code, report, shown = evaluate("--reward", "rewards.py:compute_score", file="verl.parquet")
    assert code == 0, shown
    means = {name: result["rewards"]["compute_score"]["mean"] for name, result in report["sources"].items()}
    # test_score/<source>: the mean over rows of the mean over responses
    assert means == {"a": (0.75 + 0.5) / 2, "b": 1.0, "all": (0.75 + 0.5 + 1) / 3}


def test_built_in_reward_follows_its_documented_rule(evaluate):
    rows = [{"prompt": "", "answer": "x #### 42", "response": ["so #### 42", "41"]}]
    arguments = ("--reward", "lightning_rlhf.rewards.rules.gsm8k_strict", "--columns", "responses=response")
    code, report, shown = evaluate(*arguments, rows=rows)
    assert code == 0, shown
    assert report["sources"]["data"]["rewards"]["gsm8k_strict"]["mean"] == 0.5


def test_reward_in_the_working_directory_is_found_by_its_dotted_path(evaluate, monkeypatch):
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    Path("rewards_here.py").write_text(
        "def length(completions):\n    return [float(len(text)) for text in completions]"
    )
    code, report, shown = evaluate("--reward", "rewards_here.length")
    assert code == 0, shown
    assert report["sources"]["a"]["rewards"]["length"]["mean"] == 1.0


def test_correctness_threshold_can_be_set(evaluate):
    _, report, _ = evaluate("--reward", "rewards.py:nine_tenths", "--correct-at", "0.9")
    result = report["sources"]["a"]["rewards"]["nine_tenths"]
    assert result["pass@1"]["mean"] == 1.0
    _, report, _ = evaluate("--reward", "rewards.py:nine_tenths", "--correct-at", "0.91")
    assert report["sources"]["a"]["rewards"]["nine_tenths"]["pass@1"]["mean"] == 0.0


def test_number_of_skipped_rows_is_shown_if_there_are_any(evaluate):
    code, _, shown = evaluate("--reward", "rewards.py:some")
    assert code == 0, shown
    (head,) = (line for line in shown.splitlines() if "left out" in line)
    position = [cell.strip() for cell in head.split("┃")].index("left out")
    cells = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines() if "│ some" in line]
    assert [row[position] for row in cells] == ["1", "0", "1"]
    assert "left out" not in evaluate("--reward", "rewards.py:length")[2]


def test_names_of_sources_are_shown_unchanged(evaluate):
    rows = [{**ROWS[0], "data_source": "[bold]math[/bold] :smile:"}]
    assert "[bold]math[/bold] :smile:" in evaluate("--reward", "rewards.py:length", rows=rows)[2]


@pytest.mark.parametrize("column", ["source", "data_source"])
def test_rows_have_sources_unless_there_are_too_many(evaluate, column):
    def sources(names):
        rows = [{"prompt": "p", "answer": "1", column: name, "responses": ["1"]} for name in names]
        _, report, shown = evaluate("--reward", "rewards.py:length", rows=rows)
        return set(report["sources"]), "33 sources, too many for separate figures" in shown

    assert sources("xyx") == ({"x", "y", "all"}, False)
    assert sources(range(32)) == ({*map(str, range(32)), "all"}, False)
    assert sources(range(33)) == ({"data"}, True)


def test_report_directory_is_created(evaluate):
    _, report, _ = evaluate("--reward", "rewards.py:length")
    arguments = ["responses.jsonl", "--reward", "rewards.py:length", "--json", "new/folder/report.json"]
    assert command.run(arguments) == 0
    assert json.loads(Path("new/folder/report.json").read_text()) == report


def test_functions_of_trl_receive_messages(evaluate):
    _, report, _ = evaluate("--reward", "rewards.py:trl", "--messages", rows=ROWS[:2])
    assert report["sources"]["a"]["rewards"]["trl"]["mean"] == 0.5
    code, _, shown = evaluate("--reward", "rewards.py:trl")
    assert code == 1
    assert "it seems to expect chat messages: set messages: true of the reward (evaluate: --messages)" in shown


def test_files_with_the_same_rows_are_compared_row_by_row(evaluate):
    after = [{**row, "prompt": "other words", "responses": [row["answer"]] * 2} for row in ROWS]
    Path("after.jsonl").write_text("".join(json.dumps(row) + "\n" for row in after))
    Path("other.jsonl").write_text(json.dumps({**ROWS[0], "prompt": "another", "answer": "2"}) + "\n")
    _, report, shown = evaluate("--reward", "rewards.py:right", others=["after.jsonl", "other.jsonl"])
    assert [item["file"] for item in report["files"]] == ["responses.jsonl", "after.jsonl", "other.jsonl"]
    (result,) = report["differences"]
    assert (result["file"], result["from"]) == ("after.jsonl", "responses.jsonl")
    # Differences 1/2, 1 and 0: mean 1/2, s^2 = (0 + 1/4 + 1/4) / 2 = 1/4, standard error 1 / (2 sqrt(3)).
    reach = 1.959964 / (2 * 3**0.5)
    right = result["rewards"]["right"]
    assert_close([right["mean"], right["low"], right["high"]], [0.5, 0.5 - reach, 1.0])  # 1.066 is cut
    assert "after.jsonl less responses.jsonl, 3 rows, 95 % intervals in brackets:" in shown
    assert "  right: +0.500 (-0.066 to +1.000)" in shown
    assert "other.jsonl has other rows than responses.jsonl, so that their rewards are not compared" in shown
    code, _, shown = evaluate("--reward", "rewards.py:right", others=["after.jsonl"] * 2)
    assert (code, "after.jsonl was given twice: name each file once" in shown) == (2, True)


def test_difference_of_rewards_that_do_not_apply_has_no_interval():
    before = [ScoredResponses("s", {"r": [1.0, math.nan]}), ScoredResponses("s", {"r": [math.nan]})]
    after = [ScoredResponses("s", {"r": [3.0]}), ScoredResponses("s", {"r": [4.0]})]
    assert difference(before, after) == {"r": {"mean": 2.0, "low": None, "high": None}}
    assert difference(before[1:], after[1:]) == {"r": {"mean": None, "low": None, "high": None}}


def test_mistakes_are_found_without_importing_torch():
    Path("rewards.py").write_text("def right(completions, missing):\n    return []\n")
    Path("responses.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    code = (
        "import sys; from lightning_rlhf.extras.commands import evaluate; evaluate.run(sys.argv[1:]); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "responses.jsonl", "--reward", "rewards.py:right"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"
    assert "reward function 'right' needs 'missing'" in ended.stderr


def test_pass_at_k_is_the_share_of_draws_with_a_right_response():
    for right in itertools.product((0.0, 1.0), repeat=5):
        result = statistics([ScoredResponses("s", {"r": list(right)}, characters=[1] * 5)], 1.0)["rewards"]["r"]
        for k in (1, 2, 4, 5):
            draws = list(itertools.combinations(right, k))
            assert_close(result[f"pass@{k}"]["mean"], sum(any(draw) for draw in draws) / len(draws))


def test_draw_sizes_are_powers_of_two_and_the_total():
    assert [draw_sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_pass_at_k_is_limited_by_the_smallest_number_of_responses():
    rows = [
        ScoredResponses("s", {"r": [1.0, 0.0]}, characters=[1, 1]),
        ScoredResponses("s", {"r": [1.0] * 5}, characters=[1] * 5),
    ]
    result = statistics(rows, 1.0)["rewards"]["r"]
    assert [key for key in result if key.startswith("pass")] == ["pass@1", "pass@2"]


@pytest.mark.parametrize(
    ("arguments", "rows", "code", "message"),
    [
        (["--reward", "rewards.py:rihgt"], ROWS, 2, "reward function 'rewards.py:rihgt': 'rihgt' was not found in"),
        (["--reward", "rewards.py:ids"], ROWS, 2, "reward function 'ids' needs 'completion_ids', which the file"),
        (["--reward", "rewards.py:right"], [{"prompt": "", "responses": ["1"]}], 2, "reward function 'right' needs 'a"),
        (
            ["--reward", "rewards.py:right"],
            [{"prompt": "", "answer": "1"}],
            2,
            "responses.jsonl: 1 of 1 rows cannot be used:\n  responses.jsonl:1: no column 'responses', which "
            "lightning-rlhf generate writes",
        ),
        (["--reward", "rewards.py:right"], [{**ROWS[0], "responses": [3]}], 2, "responses.jsonl: 1 of 1 rows cannot"),
        (["--reward", "rewards.py:broken"], ROWS, 1, "reward function 'broken' raised KeyError: 'mine'"),
        (
            ["--reward", "rewards.py:right", "--answer", "rewards.py:lists"],
            ROWS,
            1,
            "--answer returned a list, expected",
        ),
        (["--reward", "rewards.py:right", "--answer", "rewards.py:broken_answers"], ROWS, 1, "--answer raised KeyErr"),
        (
            ["--reward", "rewards.py:right", "--answer", "rewards.py:too_few"],
            ROWS,
            1,
            "--answer returned 1 answers to 4",
        ),
        (["--reward", "rewards.py:not_a_number"], ROWS, 1, "reward function 'not_a_number' returned nan"),
        (["--reward", "rewards.py:endless"], ROWS, 1, "reward function 'endless' returned inf"),
        (["--reward", "rewards.py:length"], [{"prompt": ["a"], "responses": ["x"]}], 2, "responses.jsonl: 1 of 1 rows"),
        (
            ["--reward", "rewards.py:length"],
            [{**row, "data_source": s} for row, s in zip(ROWS, ("all", "b", "c"), strict=True)],
            2,
            "a source is called 'all', the name of the statistics over all sources: rename it",
        ),
        (["--reward", "rewards.py:length"], [], 2, "responses.jsonl: 0 rows read, 0 kept: no row can be used"),
        (["--reward", "rewards.py:length", "--correct-at", "nan"], ROWS, 2, "--correct-at must be a number, got nan"),
        (["--reward", "rewards.py:length", "--json", "rewards.py/x"], ROWS, 2, "cannot write rewards.py/x: "),
        (["--reward", "rewards.py:length", "--columns", "x"], ROWS, 2, "--columns needs field=column"),
    ],
)
def test_mistakes_give_a_one_line_message(evaluate, arguments, rows, code, message):
    result, _, shown = evaluate(*arguments, rows=rows)
    assert result == code
    assert f"lightning-rlhf: {message}" in shown
    assert not Path("report.json").exists()


def rows_kept(evaluate, *arguments, rows=ROWS):
    """Return the rows that the command writes, and its output."""
    Path("rows.jsonl").unlink(missing_ok=True)
    code, _, shown = evaluate(*arguments, "--to", "rows.jsonl", rows=rows)
    assert code == 0, shown
    return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()], shown


def texts(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


def test_best_response_to_each_prompt_becomes_a_row(evaluate):
    rows, shown = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "best")
    assert texts(rows, "prompt", "completion", "answer") == [("p", "1", "1"), ("p", "1", "9"), ("p", "5", "5")]
    assert "rows.jsonl has 3 rows from 3 of 3 prompts" in shown


def test_different_responses_above_a_reward_become_rows(evaluate):
    rows, shown = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "above", "0.5")
    assert texts(rows, "completion", "data_source") == [("1", "a"), ("5", "b")]
    assert "rows.jsonl has 2 rows from 2 of 3 prompts" in shown
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "above", "-1")
    assert texts(rows, "completion") == [("1",), ("2",), ("3",), ("1",), ("2",), ("?",), ("5",)]


def test_best_and_worst_responses_become_pairs(evaluate):
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "pairs")
    assert texts(rows, "prompt", "chosen", "rejected") == [("p", "1", "2")]  # the others have equal rewards


def test_rewards_are_summed_and_those_that_do_not_apply_count_0(evaluate):
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:some", "--reward", "rewards.py:length", "--keep", "pairs")
    assert texts(rows, "chosen", "rejected") == [("1", "?")]
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:some", "--keep", "above", "0")
    assert ("?",) not in texts(rows, "completion")


def test_responses_that_were_cut_are_not_kept(evaluate):
    cut = [{**ROWS[0], "finish_reasons": ["length", "length", "stop", "length"]}]
    assert texts(rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "best", rows=cut)[0], "completion") == [
        ("2",)
    ]
    better = [{**ROWS[0], "finish_reasons": ["stop", "stop", "length", "length"]}]
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "pairs", rows=better)
    assert texts(rows, "chosen", "rejected") == [("1", "2")]  # the worst may be cut


def test_messages_are_continued_by_the_response_or_the_conversation(evaluate):
    question = [{"role": "user", "content": "p"}]
    row = {"messages": question, "answer": "1", "responses": ["2", "1"]}
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "best", rows=[row])
    answer = {"role": "assistant", "content": "1"}
    assert rows[0]["messages"] == [*question, answer]
    rows, _ = rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", "pairs", rows=[row])
    assert (rows[0]["prompt"], rows[0]["chosen"]) == (question, [answer])
    turns = [[{"role": "assistant", "content": text}, {"role": "user", "content": "no"}, answer] for text in "12"]
    with_turns = {**row, "response_messages": turns, "turns": [2, 2], "environment_rewards": [0.0, 1.0]}
    rows, _ = rows_kept(evaluate, "--keep", "best", rows=[with_turns])
    assert rows[0]["messages"] == [*question, *turns[1]]


def test_kept_rows_are_read_by_the_data_modules(evaluate):
    from lightning_rlhf import ConversationDataModule, PreferenceDataModule
    from lightning_rlhf.data.tokenizers import CharacterTokenizer

    for keep, kind in (("best", ConversationDataModule), ("pairs", PreferenceDataModule)):
        rows_kept(evaluate, "--reward", "rewards.py:right", "--keep", keep)
        data = kind("rows.jsonl", CharacterTokenizer("p123459?"), batch_size=1, max_tokens=8)
        data.setup("fit")
        assert len(data.examples["train"]) == {"best": 3, "pairs": 1}[keep]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "best"], "--keep and --to belong together"),
        (["--to", "rows.jsonl"], "--keep and --to belong together"),
        (["--keep", "worst", "--to", "rows.jsonl"], "--keep must be best, pairs, or above with a number, got 'worst'"),
        (["--keep", "above", "--to", "rows.jsonl"], "--keep must be best, pairs, or above with a number, got 'above'"),
        (["--keep", "above", "x", "--to", "rows.jsonl"], "got 'above x'"),
        (["--keep", "best", "--to", "rows.txt"], "--to must end with .jsonl, got 'rows.txt'"),
        (["--keep", "best", "--to", "responses.jsonl"], "responses.jsonl exists already: choose another name"),
    ],
)
def test_mistakes_of_keep_are_found_before_scoring(evaluate, arguments, message):
    code, _, shown = evaluate("--reward", "rewards.py:right", *arguments)
    assert code == 2
    assert message in shown


def test_no_kept_response_is_an_error(evaluate):
    code, _, shown = evaluate("--reward", "rewards.py:right", "--keep", "above", "1", "--to", "rows.jsonl")
    assert code != 0
    assert "rows.jsonl was not written: no response was kept" in shown
    assert not Path("rows.jsonl").exists()
