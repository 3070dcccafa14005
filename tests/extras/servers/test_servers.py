"""Several vLLM servers as one engine: shares, failures, new servers; with servers that generate nothing."""

import random
import threading
import time

import pytest
import torch

from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.extras.servers import servers
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.extras.servers.servers import Addresses
from lightning_rlhf.rollout.generation import generate, submit
from lightning_rlhf.types import SamplingParams, TokenPrompt
from tests.extras.servers.stub_server import valid_server
from tests.rollout.engines import setup_of, source_of

SAMPLING = SamplingParams(4)
PARAMETERS = [("w", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2))]
ROUTE = "/inference/v1/generate"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(servers, "_RETRY_SECONDS", 0.02)


@pytest.fixture
def make(tmp_path):
    """Build an engine with weights of version 1."""
    made = []

    def make(urls, **arguments):
        engine = VLLMServerEngine(urls, **{"timeout": 10, **arguments})
        made.append(engine)
        engine.start(setup_of(source_of(), tmp_path / "ours"))
        engine.wait()
        engine.update_weights(PARAMETERS, 1)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make, stubs):
    return make([stub.url for stub in stubs])


def prompts(count, length=2):
    return [[4 + number % 57] * length for number in range(count)]


def shares(stubs):
    """Return the number of generated responses of each server."""
    return [
        sum(path == ROUTE and "prompt_logprobs" not in body["sampling_params"] for path, body in stub.requested)
        for stub in stubs
    ]


def slowly(stub, seconds):
    """Let a server answer requests for responses after some time."""
    answer = stub.answers[ROUTE]

    def answer_later(body):
        time.sleep(seconds)
        return answer(body)

    stub.answers[ROUTE] = answer_later


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_are_shared_and_all_servers_have_the_weights(engine, stubs):
    all_arrived = threading.Barrier(64)
    for stub in stubs:
        answer = stub.answers[ROUTE]
        stub.answers[ROUTE] = lambda body, answer=answer: (all_arrived.wait(20), answer(body))[1]
    completions = generate(engine, prompts(64), SAMPLING, range(64))
    assert [completion.token_ids for completion in completions] == prompts(64)
    assert {completion.policy_version for completion in completions} == {1}
    assert shares(stubs) == [32, 32]
    assert stubs[0].version == stubs[1].version
    for stub in stubs:
        assert stub.paths().count("/update_weights") == 1


def test_a_server_that_ends_costs_its_share_and_no_response(engine, stubs, caplog):
    for stub in stubs:
        slowly(stub, 0.2)
    generation = submit(engine, prompts(40), SAMPLING, range(40))
    until(lambda: min(shares(stubs)) > 0)
    stubs[0].close()
    stubs[0].answers[ROUTE] = None  # its open connections break
    assert [completion.token_ids for completion in generation.result()] == prompts(40)
    assert engine.restarted == 1
    before = shares(stubs)
    generate(engine, prompts(10), SAMPLING, range(10))
    assert shares(stubs) == [before[0], before[1] + 10]
    engine.update_weights(PARAMETERS, 2)
    assert {each.policy_version for each in generate(engine, prompts(4), SAMPLING, range(4))} == {2}


def test_a_server_that_was_restarted_gets_the_weights_and_its_share(engine, stubs):
    engine.update_weights(PARAMETERS, 2)
    stubs[0].version = "default"
    until(lambda: stubs[0].version == stubs[1].version)
    assert stubs[0].paths().count("/update_weights") == 3
    slowly(stubs[0], 0.02)
    slowly(stubs[1], 0.02)
    until(lambda: all(member.is_used for member in engine._running.members))
    before = shares(stubs)
    assert {each.policy_version for each in generate(engine, prompts(40), SAMPLING, range(40))} == {2}
    assert min(now - earlier for now, earlier in zip(shares(stubs), before, strict=True)) >= 14


def test_a_server_that_hangs_is_left_out_and_its_requests_are_sent_again(make, stubs):
    engine = make([stub.url for stub in stubs], silent_seconds=0.3)
    hangs = threading.Event()
    for path in (ROUTE, "/weight_info"):
        answer = stubs[0].answers[path]
        stubs[0].answers[path] = lambda body, answer=answer: (hangs.is_set() and time.sleep(4)) or answer(body)
    hangs.set()
    began = time.monotonic()
    assert len(generate(engine, prompts(40), SAMPLING, range(40))) == 40
    assert time.monotonic() - began < 3
    hangs.clear()
    until(lambda: all(member.is_used for member in engine._running.members))


def test_one_server_that_ends_is_awaited(make, tmp_path):
    stub = valid_server(tmp_path / "first")
    engine = make(stub.url, timeout=0.5)
    assert len(generate(engine, prompts(3), SAMPLING, range(3))) == 3
    stub.close()
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"the vLLM server at .* cannot be reached"):
        generate(engine, prompts(3), SAMPLING, range(3))
    assert 0.4 < time.monotonic() - began < 5


def test_a_request_that_fails_on_a_working_server_is_sent_three_times(engine, stubs):
    for stub in stubs:
        stub.answers[ROUTE] = 500, {"error": {"message": "out of cheese"}}
    with pytest.raises(EngineDied, match="out of cheese"):
        generate(engine, prompts(1), SAMPLING, [0])
    assert sum(shares(stubs)) == 3
    assert engine.restarted == 0


def test_lost_connections_of_a_working_server_cost_nothing(engine, stubs):
    draw, lock = random.Random(0), threading.Lock()
    for stub in stubs:
        answer = stub.answers[ROUTE]

        def lossy(body, answer=answer):
            with lock:
                return None if draw.random() < 0.05 else answer(body)

        stub.answers[ROUTE] = lossy
    completions = generate(engine, prompts(60), SAMPLING, range(60))
    assert [completion.token_ids for completion in completions] == prompts(60)
    assert engine.restarted == 0


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
def test_nonsense_of_one_server_is_answered_by_the_other(engine, stubs, nonsense):
    stubs[0].answers[ROUTE] = 200, nonsense
    stubs[0].answers["/weight_info"] = 200, b"<html>"
    assert len(generate(engine, prompts(20), SAMPLING, range(20))) == 20
    assert engine.restarted == 1


@pytest.fixture(params=[[61], [-1], [5] * 5], ids=str)
def invalid(request, stubs):
    """A response whose tokens cannot be those of a response: outside the vocabulary, or too many."""
    content = [{"logprob": -1.0}] * len(request.param)
    version = {"start": 0, "version": stubs[0].version}
    choice = {"token_ids": request.param, "logprobs": {"content": content}, "weight_versions": [version]}
    return 200, {"choices": [{**choice, "finish_reason": "stop"}]}


def test_tokens_of_one_server_that_cannot_be_a_response_are_those_of_the_other(engine, stubs, invalid):
    def answer(body):
        stubs[0].answers["/weight_info"] = 200, b"<html>"
        return invalid

    stubs[0].answers[ROUTE] = answer
    completions = generate(engine, prompts(20), SAMPLING, range(20))
    assert [completion.token_ids for completion in completions] == prompts(20)
    assert engine.restarted == 1


def test_tokens_of_all_servers_that_cannot_be_a_response_end_the_run(engine, stubs, invalid):
    for stub in stubs:
        stub.answers[ROUTE] = invalid
    with pytest.raises(EngineDied, match=r"sent an invalid response \(RunError: "):
        generate(engine, prompts(20), SAMPLING, range(20))


def test_a_server_fails_max_restarts_times(make, stubs):
    engine = make([stub.url for stub in stubs], max_restarts=2)
    for count in (1, 2, 3):
        stubs[0].version = "default"
        until(lambda count=count: engine.restarted == count)
        if count < 3:
            until(lambda: engine._running.members[0].is_used)
    time.sleep(0.2)
    assert engine._running.members[0].given_up
    assert stubs[0].version == "default"
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9


def test_a_push_that_one_server_cannot_load_reaches_the_other(engine, stubs):
    stubs[0].answers["/update_weights"] = 500, {"error": {"message": "out of cheese"}}
    engine.update_weights(PARAMETERS, 2)
    assert {each.policy_version for each in generate(engine, prompts(9), SAMPLING, range(9))} == {2}
    assert stubs[0].version.startswith("unfinished")
    stubs[0].answers["/update_weights"] = 200, {"message": "done"}
    if not engine._running.members[0].given_up:
        until(lambda: engine._running.members[0].is_used)


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("nonsense", [[], {}, 3, {"choices": []}])
def test_a_server_that_does_not_confirm_a_step_of_a_push_is_left_out(engine, stubs, path, nonsense):
    before = stubs[0].answers.get(path, (200, {"message": "done"}))
    stubs[0].answers[path] = 200, nonsense
    engine.update_weights(PARAMETERS, 2)
    assert not engine._running.members[0].is_used
    assert stubs[0].version != stubs[1].version
    assert {each.policy_version for each in generate(engine, prompts(9), SAMPLING, range(9))} == {2}
    stubs[0].answers[path] = before
    if not engine._running.members[0].given_up:
        until(lambda: engine._running.members[0].is_used)


@pytest.mark.parametrize("answer", [None, (500, {"error": {"message": "busy"}})])
def test_a_server_that_may_still_be_paused_after_a_push_is_used_when_it_was_resumed(engine, stubs, answer):
    stubs[0].answers["/resume"] = answer if answer else lambda body: None
    engine.update_weights(PARAMETERS, 2)
    member = engine._running.members[0]
    assert stubs[0].version == stubs[1].version
    assert not member.is_used
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    stubs[0].requested.clear()
    stubs[0].answers["/resume"] = 200, {"message": "done"}
    until(lambda: member.is_used or member.given_up)
    assert member.is_used
    assert set(stubs[0].paths()) <= {"/weight_info", "/resume"}  # it had the weights


@pytest.mark.parametrize("path", ["/server_info", "/version"])
@pytest.mark.parametrize("nonsense", [None, [], {}, {"vllm_config": 3}])
def test_a_server_that_describes_itself_by_nonsense_is_not_used(make, stubs, path, nonsense):
    stubs[0].answers[path] = 200, nonsense
    engine = make([stub.url for stub in stubs])
    generate(engine, prompts(9), SAMPLING, range(9))
    assert shares(stubs) == [0, 9]


def test_servers_join_and_leave_between_steps(make, stubs, tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text(f"{stubs[0].url}\n")
    engine = make(str(file))
    generate(engine, prompts(9), SAMPLING, range(9))
    assert shares(stubs) == [9, 0]
    file.write_text(f"{stubs[0].url}\n\n{stubs[1].url}/\n")
    engine.update_weights(PARAMETERS, 2)
    until(lambda: all(member.is_used for member in engine._running.members))
    slowly(stubs[0], 0.02)
    slowly(stubs[1], 0.02)
    generate(engine, prompts(40), SAMPLING, range(40))
    assert min(shares(stubs)) >= 14
    file.write_text(f"{stubs[1].url}\n")
    engine.update_weights(PARAMETERS, 3)
    before = shares(stubs)
    assert {each.policy_version for each in generate(engine, prompts(9), SAMPLING, range(9))} == {3}
    assert shares(stubs) == [before[0], before[1] + 9]
    file.write_text("")
    engine.update_weights(PARAMETERS, 4)
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    assert engine.restarted == 0


def test_a_server_that_joins_with_unsuitable_settings_is_not_used(make, stubs, tmp_path, caplog, monkeypatch):
    stubs[1].config["model_config"]["dtype"] = "torch.bfloat16"
    file = tmp_path / "servers.txt"
    file.write_text(stubs[0].url)
    engine = make(str(file))
    file.write_text(f"{stubs[0].url}\n{stubs[1].url}")
    engine.update_weights(PARAMETERS, 2)
    until(lambda: engine._running.members[1].given_up)
    assert "--dtype float32, not torch.bfloat16" in str(engine._running.members[1].cause)
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    assert stubs[1].version == "default"


def test_servers_with_other_transfers_or_settings_are_rejected_before_the_run(make, stubs):
    stubs[1].config["weight_transfer_config"] = {"backend": "nccl"}
    with pytest.raises(ValueError, match="with the backend shared_memory of the other servers, not nccl"):
        make([stub.url for stub in stubs])


def test_the_run_starts_with_the_servers_that_respond(make, stubs):
    stubs[1].close()
    engine = make([stub.url for stub in stubs])
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    assert shares(stubs) == [9, 0]


def test_servers_that_compute_differently_with_equal_weights_end_the_run(engine, stubs):
    answer = stubs[1].answers[ROUTE]

    def other(body):
        status, response = answer(body)
        for position in response.get("prompt_logprobs", [None])[1:]:
            position.update({token: {"logprob": -1.5} for token in position})
        return status, response

    stubs[1].answers[ROUTE] = other
    with pytest.raises(RunError, match=r"differ by 0\.5 nats .* it has damaged them, or has other settings"):
        engine.update_weights(PARAMETERS, 2)


def test_a_run_whose_servers_are_killed_at_random_has_all_responses(make, tmp_path):
    """Servers end at random; others with their addresses start with other weights."""
    stubs = [valid_server(tmp_path / str(number)) for number in range(3)]
    engine = make([stub.url for stub in stubs], max_restarts=100)
    for stub in stubs:
        slowly(stub, 0.01)
    draw, ended = random.Random(1), threading.Event()

    def kill():
        while not ended.wait(0.05):
            stub = draw.choice(stubs)
            stub.breaks = True
            time.sleep(0.05)
            stub.breaks, stub.version = False, "default"

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        version = 1
        while version < 7 or engine.restarted <= 5:  # a quick machine has fewer failures in a step
            version += 1
            engine.update_weights(PARAMETERS, version)
            completions = generate(engine, prompts(60), SAMPLING, range(60))
            assert [each.token_ids for each in completions] == prompts(60)
            assert {each.policy_version for each in completions} == {version}
    finally:
        ended.set()
        killer.join()
    for stub in stubs:
        stub.close()


def test_requests_of_a_closed_engine_are_not_sent_again(engine, stubs):
    for stub in stubs:
        slowly(stub, 0.5)
    futures = engine.request([TokenPrompt(prompt) for prompt in prompts(10)], [SAMPLING] * 10, list(range(10)))
    until(lambda: sum(shares(stubs)) == 10)
    engine.close()
    for future in futures:
        assert isinstance(future.exception(timeout=5), EngineDied)
    time.sleep(0.3)
    assert sum(shares(stubs)) == 10


def test_weights_that_a_restarted_server_gets_have_their_own_label(engine, stubs, monkeypatch):
    """The trainer pushes new weights while a server gets the last ones, and the new push fails there."""
    inspects, continues, sums = threading.Event(), threading.Event(), []
    inspect, update = engine._inspect, stubs[0].answers.get("/update_weights", (200, {"message": "done"}))

    def slow_inspect(server):
        if server.url == stubs[0].url:
            inspects.set()
            continues.wait(5)
        return inspect(server)

    def received(body):
        memory = engine._push.transport._sender._shared.bytes
        sums.append((stubs[0].version, float(memory[:24].view(torch.float32).sum())))
        return update

    monkeypatch.setattr(engine, "_inspect", slow_inspect)
    stubs[0].answers["/update_weights"] = received
    stubs[0].version = "default"
    inspects.wait(5)
    threading.Timer(0.2, continues.set).start()
    engine.update_weights([(name, tensor + 1) for name, tensor in PARAMETERS], 2)
    until(lambda: engine._running.members[0].is_used)
    for label, total in sums:
        assert total == (21.0 if label.endswith("version 2") else 15.0)


def test_servers_with_the_weights_of_an_earlier_run_are_used(make, stubs):
    for stub in stubs:
        stub.version = "run 1234, version 12"
        stub.answers["/pause"] = lambda body: time.sleep(0.3) or (200, {})  # they are looked at meanwhile
    engine = make([stub.url for stub in stubs])
    assert [member.given_up for member in engine._running.members] == [False, False]
    assert len(generate(engine, prompts(20), SAMPLING, range(20))) == 20
    assert min(shares(stubs)) > 0


def test_a_restarted_server_that_hangs_does_not_stop_the_run(make, stubs):
    engine = make([stub.url for stub in stubs], silent_seconds=0.3)
    hangs = threading.Event()
    stubs[0].answers["/pause"] = lambda body: (hangs.is_set() and time.sleep(3)) or (200, {})
    hangs.set()
    stubs[0].version = "default"
    until(lambda: not engine._running.members[0].is_used)
    began = time.monotonic()
    for version in (2, 3):
        engine.update_weights(PARAMETERS, version)
    assert time.monotonic() - began < 5  # the server hangs for 3 s at each of them
    assert {each.policy_version for each in generate(engine, prompts(9), SAMPLING, range(9))} == {3}
    hangs.clear()


def test_invalid_lines_are_ignored_after_the_start(make, stubs, tmp_path, monkeypatch):
    monkeypatch.setenv("JOB", "7")
    file = tmp_path / "servers-7.txt"
    file.write_text(stubs[0].url)
    engine = make(str(tmp_path / "servers-$JOB.txt"))
    file.write_text(f"# all\n{stubs[0].url}\n10.0.0.7:8000\nhttp://fe80::1:8000\nhttp://10.0.0.7:8000\n")
    engine.update_weights(PARAMETERS, 2)  # the last one has no key
    assert len(engine._running.members) == 1
    file.write_text("10.0.0.7:8000")
    with pytest.raises(UsageError, match=r"looks like http://127\.0\.0\.1:8000, got '10"):
        make(str(file))


@pytest.mark.parametrize("urls", ["", [], ["http://127.0.0.1:1", "127.0.0.1:2"], ["servers.txt"]])
def test_invalid_addresses_are_rejected(urls):
    with pytest.raises(UsageError, match=r"looks like http://127\.0\.0\.1:8000"):
        Addresses(urls)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("silent_seconds", 0, "silent_seconds must be positive"), ("max_restarts", -1, "max_restarts must be at least 0")],
)
def test_invalid_arguments_are_rejected(name, value, message):
    with pytest.raises(UsageError, match=message):
        VLLMServerEngine("http://127.0.0.1:1", **{name: value})
