"""Conversations of an exported model with the environment of a run: generated to a file, then evaluated."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lightning_rlhf.extras.commands import evaluate, generate
from lightning_rlhf.extras.commands.responses_file import read_lines
from lightning_rlhf.rollout.vllm.availability import vllm_installed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # which Python does not show outside of tests
WORLD = '''
from lightning_rlhf.environments import Environment, Reply

class Counts(Environment):
    """Rewards the letters of a turn, and ends after as many turns as its row has."""

    def reset(self, row, seed):
        self.left, self.seed = row["wanted"], seed
        if row["prompt"].startswith("break"):
            raise RuntimeError("a broken world")

    def step(self, text):
        self.left -= 1
        return Reply(f"{self.seed % 10}", reward=float(len(text)), done=self.left == 0)

def turns_and_last(completions, conversations, turns, stop_reasons, wanted):
    """Score 1 where everything fits."""
    last = [[m["content"] for m in messages if m["role"] == "assistant"][-1] for messages in conversations]
    fits = zip(completions, last, turns, stop_reasons, wanted)
    return [float(a == b and c <= e and (d != "done" or c == e)) for a, b, c, d, e in fits]
'''
RUN = """
model:
  class_path: lightning_rlhf.GRPOModule
  init_args: {{actor: {model}}}
data:
  class_path: lightning_rlhf.PromptDataModule
  init_args: {{train: prompts.jsonl, tokenizer: {model}}}
trainer:
  callbacks:
    - class_path: lightning_rlhf.callbacks.RolloutLoop
      init_args:
        environment: {{factory: "world.py:Counts", bridge: plain, max_turns: 4, timeout_s: null{more}}}
        max_response_tokens: 60
"""
ROWS = [{"prompt": f"{word} {i}", "count": 1 + i % 3} for i, word in enumerate(["ab", "cd", "ef", "gh", "ij"])]


@pytest.fixture
def converse(capsys, tiny_export):
    """Run generate with an environment and return its exit code and messages."""
    Path("world.py").write_text(WORLD)
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def converse(*arguments, more="", to="out.jsonl", engine="transformers", limit=("--max-tokens", "90"), loop=""):
        Path("run.yaml").write_text(RUN.format(model=tiny_export, more=more) + loop)
        who = ["--model", str(tiny_export), "--engine", engine, "--environment", "run.yaml"]
        where = ["--prompts", "prompts.jsonl", "--columns", "wanted=count", "--to", to, *limit]
        try:
            code = generate.run([*who, *where, *arguments])
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    return converse


def test_rows_contain_the_conversations(converse):
    assert converse("-n", "2") == (0, "")
    rows = read_lines(Path("out.jsonl"))
    assert [{name: row[name] for name in ("prompt", "count")} for row in rows] == ROWS
    for row in rows:
        for text, tokens, messages, turns, reward, stop in zip(
            *(row[name] for name in ("responses", "response_tokens", "response_messages", "turns")),
            *(row[name] for name in ("environment_rewards", "stop_reasons")),
            strict=True,
        ):
            output = [message["content"] for message in messages if message["role"] == "assistant"]
            written = [message["content"] for message in messages if message["role"] == "user"]
            assert text == output[-1]
            assert turns == len(output) <= row["count"]
            assert len(set(written)) <= 1
            ended = stop == "done"
            assert ended == (turns == row["count"] and row["finish_reasons"][row["responses"].index(text)] == "stop")
            assert reward == sum(map(len, output if ended else output[:-1]))
            assert sum(map(len, output)) <= tokens <= 90
    replies = {
        row["prompt"]: {m["content"] for item in row["response_messages"] for m in item if m["role"] == "user"}
        for row in rows
    }
    assert all(len(seen) <= 1 for seen in replies.values())  # one world for all samples of a prompt
    assert len(set().union(*replies.values())) > 1


@pytest.mark.slow
def test_result_is_independent_of_batches_and_interruptions(converse):
    assert converse("-n", "2", "--batch-size", "2", to="a.jsonl")[0] == 0
    assert converse("-n", "2", "--batch-size", "100", to="b.jsonl")[0] == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    whole = Path("a.jsonl").read_bytes()
    Path("a.jsonl").write_bytes(whole[: len(whole) // 2])
    assert converse("-n", "2", "--batch-size", "2", to="a.jsonl")[0] == 0
    assert Path("a.jsonl").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_vllm_generates_conversations(converse):
    assert converse("-n", "2", engine="vllm") == (0, "")
    assert evaluate.run(["out.jsonl", "--reward", "world.py:turns_and_last", "--columns", "wanted=count"]) == 0


def test_conversations_are_evaluated_by_the_environment_and_by_functions(converse, capsys):
    assert converse("-n", "3") == (0, "")
    arguments = ["out.jsonl", "--reward", "world.py:turns_and_last", "--columns", "wanted=count"]
    assert evaluate.run([*arguments, "--json", "report.json"]) == 0
    rewards = json.loads(Path("report.json").read_text())["sources"]["data"]["rewards"]
    assert rewards["turns_and_last"]["mean"] == 1.0
    rows = read_lines(Path("out.jsonl"))
    mean = sum(sum(row["environment_rewards"]) / 3 for row in rows) / len(rows)
    assert rewards["environment"]["mean"] == pytest.approx(mean, rel=1e-6)
    assert evaluate.run(["out.jsonl"]) == 0  # the environment's reward alone
    assert "environment" in capsys.readouterr().out


@pytest.mark.slow
def test_failures_end_the_command_or_are_skipped(converse):
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "break", "count": 1}) + "\n" + json.dumps(ROWS[0]) + "\n")
    code, error = converse()
    assert code == 1
    assert "a broken world" in error
    code, error = converse(more=", on_error: end", to="end.jsonl")
    assert code == 0
    assert [row["environment_rewards"][0] is None for row in read_lines(Path("end.jsonl"))] == [True, False]
    assert evaluate.run(["end.jsonl", "--json", "report.json"]) == 0
    assert json.loads(Path("report.json").read_text())["sources"]["data"]["rewards"]["environment"]["not_applicable"]


def test_environment_settings_must_not_change(converse):
    assert converse()[0] == 0
    code, error = converse(more=", max_turn_tokens: 3")
    assert code == 2
    assert "environment was" in error


@pytest.mark.slow
def test_stop_tokens_of_the_run_end_turns(converse, tiny_export):
    tokenizer = AutoTokenizer.from_pretrained(tiny_export)
    letter = "a"
    (stop,) = tokenizer(letter, add_special_tokens=False)["input_ids"]
    assert converse("-n", "4")[0] == 0
    assert converse("-n", "4", to="stop.jsonl", loop=f"        stop_token_ids: [{stop}]\n")[0] == 0

    def turns(path):
        rows = read_lines(Path(path))
        messages = [message for row in rows for messages in row["response_messages"] for message in messages]
        return [message["content"] for message in messages if message["role"] == "assistant"]

    assert any(letter in turn[:-1] for turn in turns("out.jsonl"))
    assert all(letter not in turn[:-1] for turn in turns("stop.jsonl"))
    assert any(turn.endswith(letter) for turn in turns("stop.jsonl"))
    code, error = converse("-n", "4", to="stop.jsonl")
    assert code == 2
    assert "stop_token_ids" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "http://127.0.0.1:9"], "--environment needs --model"),
        (["--environment", "plain.yaml"], "plain.yaml has no RolloutLoop with an environment"),
        (["--environment", "absent.yaml"], "absent.yaml"),
    ],
)
def test_invalid_settings_are_rejected(converse, arguments, message):
    plain = RUN.replace("environment: {{", "stop_token_ids: [1]\n        # {{")
    converse()
    Path("plain.yaml").write_text(plain.format(model="model", more=""))
    code, error = converse(*arguments)
    assert code == 2
    assert message in error


def test_file_without_rewards_needs_a_function(capsys):
    Path("plain.jsonl").write_text(json.dumps({"prompt": "p", "responses": ["a"]}) + "\n")
    assert evaluate.run(["plain.jsonl"]) == 2
    assert "set --reward, because the file has no column 'environment_rewards'" in capsys.readouterr().err


def test_token_limit_is_that_of_the_run(converse):
    assert converse("-n", "4", limit=())[0] == 0
    tokens = [count for row in read_lines(Path("out.jsonl")) for count in row["response_tokens"]]
    assert max(tokens) == 60


def test_function_must_not_have_the_name_of_an_environment_reward(capsys):
    Path("own.py").write_text("def environment(completions):\n    return [1.0 for _ in completions]\n")
    row = {"prompt": "p", "responses": ["a"], "environment_rewards": [0.5]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    assert evaluate.run(["rows.jsonl", "--reward", "own.py:environment"]) == 2
    assert "a reward function has the name 'environment', but so have the rewards in the" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0.5", True, [1.0]])
def test_rewards_that_are_not_numbers_make_bad_rows(capsys, value):
    rows = [{"prompt": "p", "responses": ["a", "b"], "environment_rewards": [item, None]} for item in (value, 0.5)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate.run(["rows.jsonl"]) == 2
    assert f"'environment_rewards' has {value!r}, expected numbers and null" in capsys.readouterr().err
    assert evaluate.run(["rows.jsonl", "--on-bad-row", "skip"]) == 0
