"""Agents with OpenAI's client: rows, branches, rejected requests, failures."""

import contextlib
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection

import pytest

from lightning_rlhf import GRPOModule, PPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import EnvironmentSettings, MarkedToolCalls
from lightning_rlhf.environments.bridges import TemplateBridge
from lightning_rlhf.environments.hosts import ThreadHost
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.extras.agents import endpoint as endpoint_module
from lightning_rlhf.extras.agents.endpoint import AgentEndpoint
from lightning_rlhf.rollout.conversations import ConversationRequest, ConversationSampler
from lightning_rlhf.rollout.engine import EngineTraits
from lightning_rlhf.rollout.generation import CompletionCheck, serve
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import Prompt, SamplingParams
from tests.environments.spy import Spy
from tests.extras.agents import agents
from tests.stand_ins import TinyModel, quiet_trainer

pytest.importorskip("openai", reason="needs the openai client")
pytestmark = pytest.mark.timeout(120)
LETTERS = CharacterTokenizer("abcdefgh", chat=True).load()
END = LETTERS.eos_token_id


def ids(text):
    return LETTERS(text, add_special_tokens=False)["input_ids"]


def requests(count, row=None, max_tokens=24):
    sampling = SamplingParams(max_tokens, stop_token_ids=(END,))
    messages = [{"role": "user", "content": "a"}]
    return [
        ConversationRequest(Prompt(ids("a"), "a", row or {}, messages), i, tuple(range(9 * i, 9 * i + 8)), sampling)
        for i in range(count)
    ]


@pytest.fixture
def converse():
    """Run agents with an engine."""
    samplers = []

    def converse(engine, requested, **settings):
        settings = EnvironmentSettings(**({"max_turns": 4, "timeout_s": 60.0, "concurrency": 4} | settings))
        samplers.append(ConversationSampler(settings, settings.make_bridge(LETTERS, {}), LETTERS))
        check = CompletionCheck(100, engine.version, 10**6)
        return serve(engine, requested, partial(samplers[-1], check=check), None).result()

    yield converse
    for sampler in samplers:
        sampler.close()


@pytest.mark.parametrize(
    ("agent", "timeout_s"), [(agents.TwoTurns, 60.0), (agents.TwoTurns, None), (agents.AsyncTwoTurns, 60.0)]
)
def test_row_contains_exactly_the_requests_and_answers_of_the_engine(converse, agent, timeout_s):
    engine = Spy(LETTERS, ["bc"])
    (completion,) = converse(engine, requests(1), factory=agent, timeout_s=timeout_s)
    output = [*ids("bc"), END]
    assert engine.prompts == [ids("a"), [*ids("a"), *output, *ids("gh")]]
    assert completion.token_ids == [*output, *ids("gh"), *output]
    assert completion.sampled == (True,) * 3 + (False,) * 2 + (True,) * 3
    record = completion.conversation
    assert (record.stop, record.turn_ends, record.prompt_ids) == ("done", [3, 8], ids("a"))
    assert record.turn_rewards == [0.0, 1.0]
    assert record.metrics == {"branches": 0.0, **({"asked": 2.0} if agent is agents.TwoTurns else {})}
    assert [message["role"] for message in record.messages] == ["user", "assistant", "user", "assistant"]


def test_edited_history_starts_a_branch_whose_prompt_contains_it(converse):
    engine = Spy(LETTERS, ["bd"])
    (completion,) = converse(engine, requests(1), factory=agents.Rewrites, max_turns=8)
    output = [*ids("bd"), END]
    edited = [*ids("a"), *ids("c"), END, *ids("gh"), *output, *ids("gh")]
    assert engine.prompts[2:] == [edited, [*edited, *output, *ids("h")]]
    first = [*output, *ids("gh"), *output]
    assert completion.conversation.prompt_ids == ids("a")
    assert completion.token_ids == [*first, *edited, *output, *ids("h"), *output]
    assert (
        completion.sampled
        == (True,) * 3 + (False,) * 2 + (True,) * 3 + (False,) * len(edited) + (True,) * 3 + (False,) + (True,) * 3
    )
    start = len(first) + len(edited)
    assert completion.conversation.text_starts == [len(first)]
    assert completion.conversation.turn_ends == [3, 8, start + 3, start + 7]
    assert completion.conversation.turn_rewards == [0.0, 0.0, 0.0, 1.0]
    assert completion.logprobs == [-1.0 if sampled else 0.0 for sampled in completion.sampled]
    assert completion.conversation.metrics == {"branches": 1.0}


def test_other_tools_start_a_branch_whose_prompt_names_them(converse, monkeypatch):
    prompts = []
    real = TemplateBridge.conversation

    def conversation(bridge, messages, tools):
        prompts.append([tool["function"]["name"] for tool in tools])
        return real(bridge, messages, tools)

    monkeypatch.setattr(TemplateBridge, "conversation", conversation)
    (completion,) = converse(Spy(LETTERS, ["b"]), requests(1), factory=agents.ChangesTools, max_turns=8)
    assert prompts == [["look"], ["write"]]  # the third request continues the second
    assert completion.conversation.metrics == {"branches": 1.0}
    assert len(completion.conversation.turn_ends) == 3


@pytest.mark.slow
def test_alternating_requests_of_two_agents_continue_their_branches(converse):
    """The branch with the last turn is the last one of the row."""
    engine = Spy(LETTERS, ["b"])
    (completion,) = converse(engine, requests(1), factory=agents.Alternates, max_turns=8)
    output = [*ids("b"), END]
    first, second = ([*ids(text), *output, *ids("h"), *output] for text in ("a", "g"))
    assert engine.prompts == [ids("a"), ids("g"), first[:-2], second[:-2], [*first, *ids("h")]]
    assert completion.conversation.prompt_ids == ids("g")
    assert completion.token_ids == [*second[1:], *first, *ids("h"), *output]
    assert (completion.conversation.text_starts, completion.conversation.metrics) == (
        [len(second) - 1],
        {"branches": 1.0},
    )
    assert completion.conversation.turn_rewards == [0.0] * 4 + [1.0]


def test_stream_contains_the_whole_answer(converse):
    (completion,) = converse(Spy(LETTERS, ["bcd"]), requests(1), factory=agents.Streams)
    assert completion.conversation.turn_rewards == [3.0]


def test_tool_calls_are_returned_to_the_client(converse):
    engine = Spy(LETTERS, ["ebf", "d"])
    requested = requests(1)
    parser = MarkedToolCalls("t", "x", start="e", end="f")
    (completion,) = converse(engine, requested, factory=agents.CallsTools, parser=parser, max_turns=2)
    assert completion.conversation.turn_rewards == [0.0, 9.0]  # every turn of this engine is a call
    assert completion.conversation.tool_calls == 2
    assert completion.token_ids == [*ids("ebf"), END, *ids("c"), *ids("ebf"), END]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("row", "max_turns", "turns", "stop"),
    [
        ({"code": "max_turns"}, 3, 3, "max_turns"),
        ({"code": "context_length_exceeded"}, 8, 6, "tokens"),  # 24 tokens: 3 for each turn, 1 between
        ({"code": "context_length_exceeded", "max_tokens": 2}, 8, 6, "tokens"),  # 2 for each turn, 2 between
    ],
)
def test_requests_beyond_a_limit_are_rejected(converse, row, max_turns, turns, stop):
    (completion,) = converse(Spy(LETTERS, ["bc"]), requests(1, row), factory=agents.TooMany, max_turns=max_turns)
    assert (len(completion.conversation.turn_ends), completion.conversation.stop) == (turns, stop)
    assert completion.conversation.turn_rewards[-1] == turns
    assert len(completion.token_ids) <= 24


@pytest.mark.slow
def test_turn_limited_by_the_agent_is_continued_after_its_missing_end(converse):
    engine = Spy(LETTERS, ["bcd"])
    row = {"code": "max_turns", "max_tokens": 2}
    (completion,) = converse(engine, requests(1, row), factory=agents.TooMany, max_turns=2)
    assert engine.prompts == [ids("a"), [*ids("abc"), END, *ids("b")]]
    assert completion.token_ids == [*ids("bc"), END, *ids("b"), *ids("bc")]
    assert completion.sampled == (True,) * 2 + (False,) * 2 + (True,) * 2


def test_turn_truncated_by_a_limit_of_the_run_ends_the_conversation(converse):
    row = {"code": "context_length_exceeded", "max_tokens": 5}
    engine = Spy(LETTERS, ["bcd"])
    (completion,) = converse(engine, requests(1, row), factory=agents.TooMany, max_turns=8, max_turn_tokens=2)
    assert (completion.conversation.stop, completion.conversation.turn_ends) == ("truncated", [2])


def test_request_after_a_turn_that_cannot_be_continued_is_rejected(converse, monkeypatch):
    monkeypatch.setattr(TemplateBridge, "between", lambda self, turn, written, before=(): None)
    (completion,) = converse(Spy(LETTERS, ["bc"]), requests(1, {"code": "invalid_request"}), factory=agents.TooMany)
    assert (completion.conversation.turn_ends, completion.conversation.stop) == ([3], "malformed")
    assert completion.conversation.turn_rewards == [1.0]


@pytest.mark.parametrize(
    ("stop", "between", "limits"),
    [
        ("malformed", None, {}),
        ("tokens", ids("b") * 21, {}),  # with the turn 24, of at most 24
        ("truncated", ids("b"), {"max_turn_tokens": 2}),
        ("max_turns", ids("b"), {"max_turns": 1}),
    ],
)
def test_a_repeated_request_is_refused_for_the_same_reason(converse, monkeypatch, stop, between, limits):
    monkeypatch.setattr(TemplateBridge, "between", lambda self, turn, written, before=(): between)
    (completion,) = converse(
        Spy(LETTERS, ["bc"]), requests(1), factory=agents.RepeatsRefused, timeout_s=None, **limits
    )  # fmt: skip
    assert completion.conversation.stop == stop
    assert completion.conversation.turn_rewards == [1.0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif("LIGHTNING_RLHF_VERIFIERS_PYTHON" not in os.environ, reason="needs a Python with verifiers 0.4")
def test_agent_of_verifiers_is_trained_through_its_own_http_client(converse):
    engine = Spy(LETTERS, ["bbc"])
    (completion,) = converse(engine, requests(1), factory=agents.RunsVerifiers, timeout_s=200.0)
    assert engine.prompts == [ids("b")]
    assert completion.token_ids == [*ids("bbc"), END]
    assert completion.conversation.turn_rewards == [pytest.approx(2 / 3)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", range(len(agents.WRONG)))
def test_invalid_requests_are_rejected_and_the_run_continues(converse, number):
    (completion,) = converse(Spy(LETTERS, ["bc"]), requests(1, {"number": number}), factory=agents.SendsWrong)
    assert completion.conversation.turn_rewards == [1.0]


def test_parallel_requests_are_all_answered_or_rejected(converse):
    (completion,) = converse(Spy(LETTERS, ["bc"]), requests(1), factory=agents.ManyAtOnce, max_turns=2)
    assert completion.conversation.turn_rewards[-1] == 2.0


@pytest.mark.slow
def test_parallel_requests_are_answered_sequentially(converse):
    (completion,) = converse(Spy(LETTERS, ["bc"]), requests(1), factory=agents.Parallel)
    assert completion.conversation.turn_rewards == [0.0, 2.0]
    assert completion.conversation.metrics == {"branches": 1.0}


class LateEngine(Spy):
    """Answers after two seconds, while other conversations go on."""

    traits = EngineTraits(overlaps=True)

    def request(self, prompts, sampling, seeds):
        futures = [Future() for _ in prompts]
        completions = super().request(prompts, sampling, seeds)

        def answer():
            for future, completion in zip(futures, completions, strict=True):
                future.set_result(completion.result())

        threading.Timer(2.0, answer).start()
        return futures


@pytest.mark.slow
def test_agent_that_ends_during_a_turn_leaves_no_request_without_an_answer(converse):
    (completion,) = converse(LateEngine(LETTERS, ["bc"]), requests(1), factory=agents.LeavesRequests)
    assert completion.conversation.turn_rewards == [1.0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("silent", "invalid"), ("raise", "error"), ("die", "died"), ("hang", "timeout"), ("text", "invalid")],
)
def test_failing_agents_do_not_affect_others(converse, fault, kind):
    columns = [{"fault": ""}, {"fault": fault}]
    requested = [
        replace(request, prompt=replace(request.prompt, columns=of_row))
        for request, of_row in zip(requests(2), columns, strict=True)
    ]
    good, bad = converse(
        Spy(LETTERS, ["bc"]), requested, factory=agents.Misbehaves, on_error="end", max_error_rate=1.0,
        timeout_s=4.0 if fault == "hang" else 60.0, concurrency=2,
    )  # fmt: skip
    assert (good.conversation.fault, good.conversation.turn_rewards) == (None, [1.0])
    assert (bad.conversation.fault, bad.conversation.stop) == (kind, "fault")
    assert bad.token_ids == [*ids("bc"), END]


def test_agent_that_waits_too_long_is_cancelled(converse):
    (completion,) = converse(
        Spy(LETTERS, ["bc"]), requests(1), factory=agents.Sleeps, on_error="zero", max_error_rate=1.0, timeout_s=0.3
    )  # fmt: skip
    assert completion.conversation.fault == "timeout"


def test_an_agent_that_cannot_be_started_is_the_error_and_all_are_released(converse, monkeypatch):
    released = []

    def call(host, call):
        raise RunError("no process is left")

    monkeypatch.setattr(ThreadHost, "call", call)
    monkeypatch.setattr(ThreadHost, "release", lambda host, key: released.append(key))
    with pytest.raises(RunError, match="no process is left"):
        converse(Spy(LETTERS, ["bc"]), requests(3), factory=agents.TwoTurns, timeout_s=None)
    assert len(released) == 3


def test_a_request_whose_body_arrives_after_the_run_is_refused(converse):
    converse(Spy(LETTERS, ["bc"]), requests(1), factory=agents.LeavesABody, timeout_s=None)
    with closing(agents.LeavesABody.opened.pop()) as connection:
        connection.send(b"{}")
        with closing(connection.getresponse()) as response:
            error = json.loads(response.read())["error"]
    assert (response.status, error["message"]) == (400, "the conversation has ended")


def test_a_run_that_fails_leaves_no_request_without_an_answer(converse, monkeypatch):
    def conversation(bridge, messages, tools):
        raise RunError("lost")

    monkeypatch.setattr(TemplateBridge, "conversation", conversation)
    with pytest.raises(RunError, match="lost"):
        converse(Spy(LETTERS, ["bc"]), requests(1), factory=agents.IsRefused, timeout_s=None)
    assert agents.IsRefused.refusals.get(timeout=10) == "the conversation has ended"


@pytest.mark.slow
def test_training_with_agents(tmp_path):
    data = PromptDataModule(
        InMemory([{"prompt": [{"role": "user", "content": "a"}]}] * 8),
        CharacterTokenizer("abcdefg", chat=True),
        batch_size=2,
        max_tokens=8,
    )
    settings = EnvironmentSettings(agents.TwoTurns, max_turns=2, max_turn_tokens=4, on_error="end", max_error_rate=1.0)
    loop = RolloutLoop(
        [], TransformersEngine(), group_size=2, max_response_tokens=16, environment=settings, validate_at_ends=False
    )
    trainer = quiet_trainer(callbacks=[loop], default_root_dir=tmp_path, max_steps=1)
    trainer.fit(GRPOModule(TinyModel(), minibatch_size=4), datamodule=data)
    assert trainer.callback_metrics["env/turns"] >= 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", [GRPOModule, PPOModule])
def test_all_branches_are_trained_on_with_the_log_probs_of_their_texts(tmp_path, packed, kind):
    data = PromptDataModule(
        InMemory([{"prompt": [{"role": "user", "content": "a"}]}] * 8),
        CharacterTokenizer("abcdefg", chat=True),
        batch_size=2,
        max_tokens=8,
    )
    settings = EnvironmentSettings(agents.Rewrites, max_turns=4, max_turn_tokens=4, on_error="end", max_error_rate=1.0)
    loop = RolloutLoop(
        [], TransformersEngine(), group_size=2, max_response_tokens=48, environment=settings, validate_at_ends=False
    )
    more = {"critic": TinyModel(seed=1)} if kind is PPOModule else {}
    trainer = quiet_trainer(callbacks=[loop], default_root_dir=tmp_path, max_steps=1)
    module = kind(TinyModel(), minibatch_size=4, packing=packed, **more)
    trainer.fit(module, datamodule=data)
    experience, rollout = module.last_step.experience, module.last_step.experience.rollout
    branched = rollout.text_starts.any(1)
    assert branched.any()
    assert len(rollout) == 4  # a conversation is one row of its group
    assert rollout.group.tolist() == [0, 0, 1, 1]
    behind = rollout.text_starts.cumsum(1) > 0
    assert (rollout.response_mask & behind).any()
    gap = (experience.old_logprobs - rollout.rollout_logprobs)[rollout.response_mask]
    assert gap.abs().max() < 1e-4


# -- the endpoint itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint():
    endpoint = AgentEndpoint()
    yield endpoint
    endpoint.close()


def send(endpoint, method, path, body=None, key=None, headers=None):
    host = endpoint.url.removeprefix("http://").removesuffix("/v1")
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    with closing(HTTPConnection(host, timeout=10)) as connection:
        connection.request(method, path, body, {**sent, **(headers or {})})
        with closing(connection.getresponse()) as response:
            return response.status, json.loads(response.read())


def test_endpoint_is_on_loopback_and_requires_the_key_of_a_conversation(endpoint):
    assert endpoint.url.startswith("http://127.0.0.1:")
    requested = []
    key = endpoint.register(lambda body: requested.append(body))
    for wrong in (None, "x", key[:-1], ""):
        status, body = send(endpoint, "POST", "/v1/chat/completions", "{}", wrong)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    endpoint.remove(key)
    assert send(endpoint, "GET", "/v1/models", key=key)[0] == 401
    assert requested == []


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/completions", "{}", {}, 404),
        ("GET", "/", None, {}, 404),
        ("POST", "/v1/chat/completions", "[]", {}, 400),
        ("POST", "/v1/chat/completions", "{", {}, 400),
        ("POST", "/v1/chat/completions", "[" * 100_000, {}, 400),
        ("POST", "/v1/chat/completions", "{" + " " * 10_000_000, {}, 400),
        ("PUT", "/v1/chat/completions", "{}", {}, 404),
    ],
)
def test_requests_that_are_not_chats_are_rejected(endpoint, method, path, body, headers, status):
    key = endpoint.register(lambda body: pytest.fail("called"))
    assert send(endpoint, method, path, body, key, headers)[0] == status
    assert send(endpoint, "GET", "/v1/models", key=key)[1]["data"][0]["id"] == "policy"


def responses(endpoint, payload, seconds=5.0):
    """Send bytes, and return the status of each response until the connection is closed or idle."""
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(payload)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)]


def post(body, key="wrong", length=None):
    length = len(body) if length is None else length
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b"[" * 1000])
def test_request_with_a_wrong_key_gets_one_answer_and_the_next_one_is_handled(endpoint, body):
    requested = []
    key = endpoint.register(lambda body: requested.append(body) or pytest.fail("called"))
    second = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n".encode()
    assert responses(endpoint, post(body) + second) == [401, 200]
    assert responses(endpoint, post(b"", length=99_000_000), seconds=0.5) == [401]
    assert responses(endpoint, post(b"", length="x")) == [400]


def test_body_without_a_valid_key_is_not_kept_in_memory(endpoint, monkeypatch):
    read = []
    monkeypatch.setattr(endpoint_module.json, "loads", lambda text: read.append(text))
    assert responses(endpoint, post(b'{"a": 1}' * 1_000_000), seconds=1.0) == [401]
    assert read == []


def test_incomplete_body_times_out(endpoint, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_BODY_SECONDS", 0.3)
    key = endpoint.register(lambda body: pytest.fail("called"))
    assert responses(endpoint, post(b'{"a', key, 50)) == [400]


def test_slow_body_times_out(endpoint, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_BODY_SECONDS", 0.5)
    key = endpoint.register(lambda body: pytest.fail("called"))
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        connection.sendall(post(b"", key, 1000))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # noqa: PT012
            for _ in range(40):
                connection.sendall(b" ")
                time.sleep(0.1)


def test_requests_beyond_the_limit_of_connections_are_refused(monkeypatch):
    monkeypatch.setattr(endpoint_module, "_MOST_CONNECTIONS", 3)
    endpoint = AgentEndpoint()
    key = endpoint.register(lambda body: pytest.fail("called"))
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n".encode()
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5.0))
        time.sleep(0.2)
        assert responses(endpoint, request) == [503]
    deadline = time.monotonic() + 10
    while responses(endpoint, request) != [200]:
        assert time.monotonic() < deadline
    endpoint.close()


def test_too_deeply_nested_values_are_rejected(endpoint):
    key = endpoint.register(lambda body: pytest.fail("called"))
    for levels in (200, 900):
        deep = '{"tools": ' + "[" * levels + "]" * levels + "}"
        status, body = send(endpoint, "POST", "/v1/chat/completions", deep, key)
        assert (status, body["error"]["message"]) == (400, "the body is nested more than 100 levels deep")
