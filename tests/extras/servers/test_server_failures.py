"""Several vLLM servers as one engine: servers that end, hang or answer nonsense while they generate."""

import random
import threading
import time

import pytest

from lightning_rlhf.expected_errors import EngineDied
from lightning_rlhf.rollout.generation import generate, submit
from lightning_rlhf.types import TokenPrompt
from tests.extras.servers.several import (
    PARAMETERS,
    SAMPLING,
    VOCABULARY,
    all_used,
    members,
    prompts,
    shares,
    slowly,
    until,
)
from tests.extras.servers.stub_server import GENERATE


def test_a_server_that_ends_costs_its_share_and_no_response(cluster, stubs):
    for stub in stubs:
        slowly(stub, 0.2)
    generation = submit(cluster, prompts(40), SAMPLING, range(40))
    until(lambda: min(shares(stubs)) > 0)
    stubs[0].close()
    stubs[0].answers[GENERATE] = None  # its open connections break
    assert [completion.token_ids for completion in generation.result()] == prompts(40)
    assert cluster.restarted == 1
    before = shares(stubs)
    generate(cluster, prompts(10), SAMPLING, range(10))
    assert shares(stubs) == [before[0], before[1] + 10]
    cluster.update_weights(PARAMETERS, 2)
    assert {each.policy_version for each in generate(cluster, prompts(4), SAMPLING, range(4))} == {2}


@pytest.mark.slow
def test_a_server_that_hangs_is_left_out_and_its_requests_are_sent_again(ready_engine, stubs):
    engine = ready_engine([stub.url for stub in stubs], silent_seconds=0.3)
    usual = dict(stubs[0].answers)
    for path in (GENERATE, "/weight_info"):
        slowly(stubs[0], 4, path)
    began = time.monotonic()
    assert len(generate(engine, prompts(40), SAMPLING, range(40))) == 40
    assert time.monotonic() - began < 3
    stubs[0].answers = usual
    until(lambda: all_used(engine))


def test_one_server_that_ends_is_awaited(ready_engine, stub):
    engine = ready_engine(stub.url, timeout=0.5)
    assert len(generate(engine, prompts(3), SAMPLING, range(3))) == 3
    stub.close()
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"the vLLM server at .* cannot be reached"):
        generate(engine, prompts(3), SAMPLING, range(3))
    assert 0.4 < time.monotonic() - began < 5


def test_a_request_that_fails_on_a_working_server_is_sent_three_times(cluster, stubs):
    for stub in stubs:
        stub.answers[GENERATE] = 500, {"error": {"message": "out of cheese"}}
    with pytest.raises(EngineDied, match="out of cheese"):
        generate(cluster, prompts(1), SAMPLING, [0])
    assert sum(shares(stubs)) == 3
    assert cluster.restarted == 0


def test_lost_connections_of_a_working_server_cost_nothing(cluster, stubs):
    draw, lock = random.Random(0), threading.Lock()
    for stub in stubs:
        answer = stub.answers[GENERATE]

        def lossy(body, answer=answer):
            with lock:
                return None if draw.random() < 0.05 else answer(body)

        stub.answers[GENERATE] = lossy
    completions = generate(cluster, prompts(60), SAMPLING, range(60))
    assert [completion.token_ids for completion in completions] == prompts(60)
    assert cluster.restarted == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        b"<html>",
        [],
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"weight_versions": 3, "finish_reason": "stop"}]},
        {"choices": [{"weight_versions": [], "finish_reason": "stop", "token_ids": [1], "logprobs": {"content": []}}]},
    ],
)
def test_nonsense_of_one_server_is_answered_by_the_other(cluster, stubs, nonsense):
    stubs[0].answers[GENERATE] = 200, nonsense
    stubs[0].answers["/weight_info"] = 200, b"<html>"  # so that it does not look healthy and is used again
    assert len(generate(cluster, prompts(20), SAMPLING, range(20))) == 20
    assert cluster.restarted == 1


@pytest.fixture(
    params=[[VOCABULARY], [-1], [5] * (SAMPLING.max_tokens + 1)],
    ids=["above the vocabulary", "negative", "too many"],
)
def invalid(request, cluster, stubs):
    """A response whose tokens cannot be those of a response, with the label of the weights that were pushed."""
    content = [{"logprob": -1.0}] * len(request.param)
    version = {"start": 0, "version": stubs[0].version}
    choice = {"token_ids": request.param, "logprobs": {"content": content}, "weight_versions": [version]}
    return 200, {"choices": [{**choice, "finish_reason": "stop"}]}


def test_tokens_of_one_server_that_cannot_be_a_response_are_those_of_the_other(cluster, stubs, invalid):
    def answer(body):
        stubs[0].answers["/weight_info"] = 200, b"<html>"  # so that it does not look healthy and is used again
        return invalid

    stubs[0].answers[GENERATE] = answer
    completions = generate(cluster, prompts(20), SAMPLING, range(20))
    assert [completion.token_ids for completion in completions] == prompts(20)
    assert cluster.restarted == 1


def test_tokens_of_all_servers_that_cannot_be_a_response_end_the_run(cluster, stubs, invalid):
    for stub in stubs:
        stub.answers[GENERATE] = invalid
    with pytest.raises(EngineDied, match=r"sent an invalid response \(RunError: "):
        generate(cluster, prompts(20), SAMPLING, range(20))


def test_a_server_is_given_up_after_max_restarts_failures(ready_engine, stubs):
    engine = ready_engine([stub.url for stub in stubs], max_restarts=2)
    for count in (1, 2):
        stubs[0].restart()
        until(lambda count=count: engine.restarted == count)
        until(lambda: members(engine)[0].is_used)
    stubs[0].restart()
    until(lambda: engine.restarted == 3)
    time.sleep(0.2)  # a failed server that is not given up is looked at every 0.02 s, and gets the weights
    assert members(engine)[0].given_up
    assert stubs[0].version == "default"
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9


def test_a_run_whose_servers_are_killed_at_random_has_all_responses(ready_engine, stubs, stub):
    """Servers end at random; others with their addresses start with other weights."""
    killed = [*stubs, stub]
    engine = ready_engine([each.url for each in killed], max_restarts=100)
    for each in killed:
        slowly(each, 0.01)
    draw, ended = random.Random(1), threading.Event()

    def kill():
        while not ended.wait(0.05):
            server = draw.choice(killed)
            server.breaks = True
            time.sleep(0.05)
            server.restart()
            server.breaks = False

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        version, deadline = 1, time.monotonic() + 60
        while version < 7 or engine.restarted <= 5:  # a quick machine has fewer failures in a step
            assert time.monotonic() < deadline
            version += 1
            engine.update_weights(PARAMETERS, version)
            completions = generate(engine, prompts(60), SAMPLING, range(60))
            assert [each.token_ids for each in completions] == prompts(60)
            assert {each.policy_version for each in completions} == {version}
    finally:
        ended.set()
        killer.join()


def test_requests_of_a_closed_engine_are_not_sent_again(cluster, stubs):
    for stub in stubs:
        slowly(stub, 0.5)
    futures = cluster.request([TokenPrompt(prompt) for prompt in prompts(10)], [SAMPLING] * 10, list(range(10)))
    until(lambda: sum(shares(stubs)) == 10)
    cluster.close()
    for future in futures:
        assert isinstance(future.exception(timeout=5), EngineDied)
    time.sleep(0.3)
    assert sum(shares(stubs)) == 10
