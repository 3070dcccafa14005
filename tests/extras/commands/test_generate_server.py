"""``generate --server`` with a server that returns scripted errors."""

import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from lightning_rlhf.extras.commands import generate as command
from lightning_rlhf.extras.commands import response_backends
from lightning_rlhf.extras.commands.responses_file import read_lines
from lightning_rlhf.extras.judges import endpoint
from tests.http_stand_in import HTTPStandIn

KEY = "0123456789abcdef"
MODELS = {"data": [{"id": "m"}]}


class Stub(HTTPStandIn):
    """Returns the next of ``answers``, pairs of status and JSON, and valid answers after the last one."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested, self.answers, self.models, self.key = [], [], (200, MODELS), None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(*self.server.models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.key and self.headers["authorization"] != f"Bearer {self.server.key}":
            return self.say(401, {"error": "no such key"})
        self.server.requested.append((self.path, body))
        output = body.get("prompt") or body["messages"][-1]["content"]
        choice = {"text": output[::-1], "message": {"content": output[::-1]}, "finish_reason": "stop"}
        good = (200, {"choices": [choice], "usage": {"completion_tokens": 3, "total_tokens": 9}})
        return self.say(*(self.server.answers.pop(0) if self.server.answers else good))

    def say(self, status, result):
        content = result if isinstance(result, bytes) else json.dumps(result).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(endpoint, "_MAX_WAIT_S", 0.01)
    monkeypatch.setenv("KEY", KEY)
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever, daemon=True)
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


@pytest.fixture
def generate(stub, capsys):
    def generate(*arguments, rows=({"prompt": "abc"}, {"prompt": [{"role": "user", "content": "de"}]})):
        Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        inputs = ["--server", stub.url, "--prompts", "prompts.jsonl", "--to", "out.jsonl"]
        code = command.run([*inputs, *arguments])
        return code, capsys.readouterr().err

    return generate


def test_text_prompts_are_completed_and_messages_are_answered(generate, stub):
    assert generate("-n", "2", "--temperature", "0.5") == (0, "")
    assert [row["responses"] for row in read_lines(Path("out.jsonl"))] == [["cba"] * 2, ["ed"] * 2]
    assert sorted(path for path, _ in stub.requested) == ["/v1/chat/completions"] * 2 + ["/v1/completions"] * 2
    assert len({body["seed"] for _, body in stub.requested}) == 4
    assert {(body["model"], body["temperature"], body["max_tokens"]) for _, body in stub.requested} == {("m", 0.5, 512)}


@pytest.fixture
def second():
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever, daemon=True)
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


ROWS = [{"prompt": f"row {number}"} for number in range(40)]
REVERSED = [[f"row {number}"[::-1]] for number in range(40)]


def responses():
    return [row["responses"] for row in read_lines(Path("out.jsonl"))]


def test_several_servers_share_the_requests_and_the_output_is_in_order(generate, stub, second):
    assert generate("--server", stub.url, second.url, "--concurrency", "1", rows=ROWS) == (0, "")
    assert responses() == REVERSED
    assert len(stub.requested) + len(second.requested) == 40
    assert min(len(stub.requested), len(second.requested)) > 5
    assert len({body["seed"] for _, body in stub.requested + second.requested}) == 40


def test_a_server_that_fails_leaves_its_requests_to_the_others(generate, stub, second):
    second.answers = [(500, {})] * 100
    assert generate("--server", stub.url, second.url, rows=ROWS) == (0, "")
    assert responses() == REVERSED
    assert len(stub.requested) == 40


def test_other_servers_continue_a_file(generate, stub, second):
    stub.answers = [(200, {"choices": [{"text": "x", "finish_reason": "stop"}]}), (400, {"error": "too odd"})]
    assert generate("--batch-size", "1", rows=ROWS[:2])[0] == 1
    assert generate("--server", second.url, stub.url, rows=ROWS[:2])[0] == 0
    assert responses() == [["x"], ["1 wor"]]


def test_servers_of_different_models_and_a_server_twice_are_rejected(generate, stub, second):
    second.models = (200, {"data": [{"id": "other"}]})
    code, error = generate("--server", stub.url, second.url)
    assert code == 2
    assert f"the servers have different models: m at {stub.url}, other at {second.url}" in error
    code, error = generate("--server", stub.url, f"{stub.url}/v1")
    assert code == 2
    assert f"--server has {stub.url} twice" in error
    assert generate("--server", stub.url, second.url, "--model", "m") == (0, "")


def test_busy_server_is_retried(generate, stub):
    stub.answers = [(429, {"error": "try again later"})] * 5 * response_backends._TRIES
    assert generate() == (0, "")
    assert len(stub.requested) == 5 * response_backends._TRIES + 2


def test_permanently_busy_server_ends_the_command(generate, stub, monkeypatch):
    monkeypatch.setattr(response_backends, "_SERVER_SECONDS", 0.05)
    stub.answers = [(429, {"error": "try again later"})] * 10_000
    code, output = generate()
    assert code == 1
    assert f"answered in the last of {response_backends._TRIES} tries: 429" in output


def test_failing_server_is_retried_and_finished_rows_are_kept(generate, stub):
    stub.answers = [(503, {}), (500, {}), (504, {}), (200, b"<html>")]
    assert generate()[0] == 0
    stub.answers = [(200, {"choices": [{"text": "x", "finish_reason": "stop"}]}), (400, {"error": "too odd"})]
    rows = [{"prompt": "first"}, {"prompt": "second"}]
    Path("out.jsonl").unlink()
    Path("out.jsonl.settings.json").unlink()
    code, output = generate("--batch-size", "1", rows=rows)
    assert code == 1
    assert output.startswith(f"lightning-rlhf: {stub.url}/v1/completions answered: 400 ")
    assert [row["responses"] for row in read_lines(Path("out.jsonl"))] == [["x"]]
    assert generate("--batch-size", "1", rows=rows)[0] == 0
    assert [row["responses"] for row in read_lines(Path("out.jsonl"))] == [["x"], ["dnoces"]]


def test_newline_after_a_key_is_removed(generate, stub, monkeypatch):
    stub.key = KEY
    monkeypatch.setenv("KEY", f"{KEY}\n")
    code, output = generate("--api-key-env", "KEY")
    assert code == 0, output
    assert KEY not in output


def test_wrong_key_is_reported_and_not_shown(generate, stub):
    stub.key = "another-key-than-that"
    code, output = generate("--api-key-env", "KEY")
    assert code == 1
    assert "answered: 401" in output
    assert KEY not in output
    assert not Path("out.jsonl").exists()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((401, {}), "/v1/models answered 401; set --api-key-env to the environment variable with the key"),
        ((503, {}), "/v1/models answered 503; it may still be loading its model"),
        ((200, b"<html>"), "/v1/models lists no models; use a server with OpenAI's API"),
        ((200, {"data": None}), "/v1/models lists no models; use a server with OpenAI's API"),
        ((200, {"data": [{"id": "a"}, {"id": "b"}]}), " serves a, b: set --model to one of them"),
    ],
)
def test_server_without_a_unique_model_gives_one_line_and_code_2(generate, stub, models, message):
    stub.models = models
    assert generate() == (2, f"lightning-rlhf: {stub.url}{message}\n")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("answer", [[], {}, {"choices": []}, {"choices": [{"text": "x"}]}, {"choices": [3]}, None])
def test_malformed_answer_gives_a_one_line_error(generate, stub, answer):
    stub.answers = [(200, answer)] * 2
    code, output = generate()
    assert code == 1
    assert "returned an invalid completion: " in output


def test_unsendable_prompt_is_a_bad_row(generate):
    rows = [{"prompt": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": False}}]
    code, output = generate(rows=rows)
    assert code == 2
    assert "'chat_template_kwargs' of the chat template cannot be sent to a server" in output
