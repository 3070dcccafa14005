"""Requests to a vLLM server, and its answers: every fault gives one line, and responses have the pushed weights."""

import logging
import re
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.environments.bridges import PlainBridge
from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.extras.servers import engine as engine_module
from lightning_rlhf.rollout.conversations import ConversationRequest, ConversationSampler
from lightning_rlhf.rollout.generation import CompletionCheck, generate, serve, submit
from lightning_rlhf.types import Prompt, PromptImages, SamplingLimits, SamplingParams, TokenPrompt
from tests.environments.worlds import Echo
from tests.extras.servers.several import PARAMETERS, VOCABULARY, slowly
from tests.extras.servers.stub_server import GENERATE
from tests.vision_models import drawing

SAMPLING = SamplingParams(4, temperature=0.5, limits=SamplingLimits(0.9, 7), stop_token_ids=(2, 3))
IMAGE = EncodedImage("ab" * 32, 8, 8, data=drawing(1).data)
UNEXPANDED = (4, 9, 5)  # one token stands for the image, as the prompt is sent
EXPANDED = [4, 9, 9, 5]  # two tokens do, as the model reads it
PROMPT_WITH_IMAGE = TokenPrompt(EXPANDED, PromptImages(images=(IMAGE,), numbers=(0,), unexpanded_ids=UNEXPANDED))


@pytest.fixture
def kept_images(stub):
    """Let the server read images; return the set of identifiers that it holds."""
    stub.changes_answer(lambda response: response.update(prompt_token_ids=EXPANDED))
    answer, kept = stub.answers[GENERATE], set()

    def answer_with_images(body):
        (part,) = body["content_parts"]
        if part["url"] is None and part["uuid"] not in kept:
            return 400, {"error": {"message": "cache miss"}}
        kept.add(part["uuid"])
        return answer(body)

    stub.answers[GENERATE] = answer_with_images
    return kept


def sent_urls(stub):
    """Return the URL of the image in each request; None where only its identifier was sent."""
    return [part["url"] for body in stub.bodies() for part in body["content_parts"]]


@pytest.mark.usefixtures("kept_images")
def test_a_first_request_of_one_token_sends_the_file_of_an_image_once(engine, stub):
    generate(engine, [PROMPT_WITH_IMAGE] * 5, SAMPLING, range(5))
    first, *others = [body["sampling_params"] for body in stub.bodies()]
    (same,) = [each for each in others if each["seed"] == first["seed"]]  # threads send the responses in any order
    assert first == {**same, "max_tokens": 1, "prompt_logprobs": None}  # its answer is not used
    generate(engine, [PROMPT_WITH_IMAGE], SAMPLING, [0])
    assert sent_urls(stub) == [IMAGE.data_url(), *[None] * 6]
    assert {tuple(body["token_ids"]) for body in stub.bodies()} == {UNEXPANDED}


def test_image_that_the_server_has_no_longer_is_sent_again(engine, stub, kept_images):
    generate(engine, [PROMPT_WITH_IMAGE], SAMPLING, [0])  # one token with the image, and the request without it
    kept_images.clear()
    generate(engine, [PROMPT_WITH_IMAGE], SAMPLING, [0])  # is refused, and sent again
    assert sent_urls(stub) == [IMAGE.data_url(), None, None, IMAGE.data_url()]
    assert {tuple(body["token_ids"]) for body in stub.bodies()} == {UNEXPANDED}


@pytest.mark.usefixtures("kept_images")
def test_image_to_which_the_server_gives_another_number_of_tokens_is_rejected(engine):
    with pytest.raises(RunError, match=r"expands a prompt with 1 images to 4 tokens and the trainer to 5; token 3"):
        generate(engine, [replace(PROMPT_WITH_IMAGE, token_ids=[4, 9, 9, 9, 5])], SAMPLING, [0])


def test_request_has_all_fields_and_answers_keep_their_order(engine, stub):
    # An answer shows the first token and the length of its prompt.
    prompts = [[first, 1, 1][:length] for length in (1, 2, 3) for first in range(VOCABULARY)] * 2
    assert len(prompts) > engine_module._CONNECTIONS
    completions = generate(engine, prompts, SAMPLING, range(len(prompts)))
    assert [c.token_ids for c in completions] == [[prompt[0]] * len(prompt) for prompt in prompts]
    assert {(*c.logprobs[:1], c.finish_reason, c.policy_version) for c in completions} == {(-0.5, "stop", 7)}
    (body,) = (body for body in stub.bodies() if body["sampling_params"]["seed"] == 3)
    assert body["token_ids"] == prompts[3]
    assert body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.0,
        "stop_token_ids": [2, 3],
        "seed": 3,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
    }


def test_no_prompts_have_no_responses(engine, stub):
    assert generate(engine, [], SAMPLING, []) == stub.bodies() == []


def test_echo_requests_the_log_probabilities_of_the_prompt_and_returns_them_first(engine, stub):
    echoed = [None, {"5": {"logprob": -3.5, "rank": 2}}, {"4": {"logprob": -0.25, "rank": 1}}]
    stub.changes_answer(lambda response: response.update(prompt_logprobs=echoed))
    (completion,) = generate(engine, [[3, 5, 4]], replace(SAMPLING, echo=True), [0])
    assert stub.bodies()[-1]["sampling_params"]["prompt_logprobs"] == 0
    assert completion.token_ids == [5, 4, 3, 3, 3]
    assert completion.logprobs == [-3.5, -0.25, -0.5, -0.5, -0.5]


def test_push_waits_for_previously_requested_responses(engine, stub):
    requested, answered = threading.Event(), threading.Event()

    def wait():
        requested.set()
        answered.wait(20)

    stub.before_answers(GENERATE, wait)
    finished = []
    generation = submit(engine, [[5], [6, 1]], SAMPLING, [1, 2], lambda *result: finished.append(result))
    assert requested.wait(20)
    assert generation.finished_at is None
    threading.Timer(0.2, answered.set).start()
    engine.update_weights(PARAMETERS, 8)
    assert generation.finished_at is not None
    assert "/pause?mode=wait" in stub.paths()[stub.paths().index(GENERATE) :]
    assert [(completion.token_ids, completion.policy_version) for completion in generation.result()] == [
        ([5], 7),
        ([6, 6], 7),
    ]
    assert sorted(finished, key=lambda result: result[0]) == list(enumerate(generation.result()))
    assert submit(engine, [[5]], SAMPLING, [1]).result()[0].policy_version == 8


def test_conversations_are_sent_as_requests_of_single_turns(engine, stub):
    turn, reply = [5, 6, 2], [5, 6]  # two letters and an end; Echo repeats the letters
    logprobs = {"content": [{"logprob": -0.5}] * len(turn)}
    stub.changes_answer(lambda response: response["choices"][0].update(token_ids=turn, logprobs=logprobs))
    tokenizer = CharacterTokenizer("abcdefgh").load()
    sampler = ConversationSampler(
        EnvironmentSettings(Echo, bridge="plain", max_turns=2, max_turn_tokens=4, timeout_s=None),
        PlainBridge(tokenizer),
        tokenizer,
    )
    sampling = replace(SAMPLING, max_tokens=9)
    requested = [
        ConversationRequest(Prompt([number], ""), 0, (number, 100 + number), sampling) for number in range(3, 40)
    ]
    check = CompletionCheck(max_tokens=9, version=7, vocabulary=20)
    rows = serve(engine, requested, partial(sampler, check=check)).result()
    sampler.close()
    assert len(stub.bodies()) == 2 * len(requested)
    sent = {body["sampling_params"]["seed"]: body for body in stub.bodies()}
    for request, row in zip(requested, rows, strict=True):
        first, second = (sent[seed] for seed in request.turn_seeds)
        assert first["token_ids"] == request.prompt.token_ids
        assert second["token_ids"] == [*request.prompt.token_ids, *turn, *reply]
        assert first["sampling_params"]["max_tokens"] == second["sampling_params"]["max_tokens"] == 4
        assert row.token_ids == [*turn, *reply, *turn]
        assert row.sampled == (True,) * 3 + (False,) * 2 + (True,) * 3
        assert row.conversation.turn_ends == [3, 8]
        assert row.policy_version == 7


def test_server_that_was_restarted_gets_the_weights_of_the_last_push_again(engine, stub):
    stub.restart()
    assert generate(engine, [[5]], SAMPLING, [0])[0].policy_version == 7
    assert stub.paths().count("/update_weights") == 2
    assert engine.restarted == 1


def test_server_to_which_another_run_pushes_is_rejected(engine, stub):
    stub.version = "run 1234, version 7"
    with pytest.raises(EngineDied, match=r"another run pushes weights to the vLLM server .* .'run 1234, version 7'."):
        generate(engine, [[5]], SAMPLING, [0])


def test_answer_that_started_with_old_weights_is_rejected(engine, stub):
    old = {"version": "old", "start": 0, "end": 0}
    stub.changes_answer(lambda response: response["choices"][0]["weight_versions"].insert(0, old))
    with pytest.raises(EngineDied, match=r"generated with the weights \['old', 'run"):
        generate(engine, [[5]], SAMPLING, [0])


def test_generation_before_the_first_push_raises(start_engine, stub):
    engine = start_engine(stub.url)
    engine.wait()
    with pytest.raises(RunError, match="have no weights yet: call update_weights"):
        generate(engine, [[5]], SAMPLING, [0])


def test_aborted_response_raises(engine, stub):
    stub.changes_answer(lambda response: response["choices"][0].update(finish_reason="abort"))
    with pytest.raises(EngineDied, match=r"aborted a response \(abort\)"):
        generate(engine, [[5]], SAMPLING, [0])


def test_broken_connection_raises_immediately(engine, stub):
    slowly(stub, 3)
    slow = stub.answers[GENERATE]

    def break_one(body):
        return None if body["token_ids"] == [1] else slow(body)  # None breaks the connection

    stub.answers[GENERATE] = break_one
    began = time.monotonic()
    with pytest.raises(EngineDied, match=f"the vLLM server at {stub.url} cannot be reached"):
        generate(engine, [[0], [1], [2]], SAMPLING, range(3))
    assert time.monotonic() - began < 2  # the other answers take 3 s


@pytest.mark.slow
def test_hanging_server_raises_after_the_timeout_and_waiting_is_logged(engine, stub, monkeypatch, caplog):
    monkeypatch.setattr("lightning_rlhf.processes.waiting.INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    monkeypatch.setattr(engine._running.members[0].server, "_timeout", 1.0)
    caplog.set_level("INFO", "lightning_rlhf")
    slowly(stub, 2)
    with pytest.raises(EngineDied, match="no response for 1 s"):
        generate(engine, [[0], [1]], SAMPLING, range(2))
    assert re.search(rf"Waiting for 2 of 2 completions for \d+ s; the vLLM servers are {stub.url}\.", caplog.text)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": {"message": "too long"}}, RunError, "rejected the request: too long"),
        (
            403,
            {"error": {"message": "Scale-out is off"}},
            UsageError,
            "does not have the route .*generate .Scale-out is off",
        ),
        (
            500,
            {"error": {"message": "EngineDead"}},
            EngineDied,
            "failed at .*generate: EngineDead; see the server's log",
        ),
        (502, b"<html>", EngineDied, "failed at .*: <html>"),
    ],
)
def test_error_message_of_the_server_is_shown(engine, stub, status, body, kind, message):
    stub.answers[GENERATE] = status, body
    with pytest.raises(kind, match=message) as error:
        generate(engine, [[0]], SAMPLING, [0])
    assert type(error.value) is kind
