"""Several vLLM servers as one engine: every server that generates has the newest weights."""

import threading
import time

import pytest
import torch

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.rollout.generation import generate
from tests.extras.servers.several import (
    FAIR_SHARE_AT_LEAST,
    PARAMETERS,
    SAMPLING,
    all_used,
    members,
    prompts,
    shares,
    slowly,
    until,
)
from tests.extras.servers.stub_server import DONE, GENERATE


def test_requests_are_shared_and_all_servers_have_the_weights(cluster, stubs):
    all_arrived = threading.Barrier(64)
    for stub in stubs:
        stub.before_answers(GENERATE, lambda: all_arrived.wait(20))
    completions = generate(cluster, prompts(64), SAMPLING, range(64))
    assert [completion.token_ids for completion in completions] == prompts(64)
    assert {completion.policy_version for completion in completions} == {1}
    assert shares(stubs) == [32, 32]
    assert stubs[0].version == stubs[1].version
    for stub in stubs:
        assert stub.paths().count("/update_weights") == 1


def test_a_server_that_was_restarted_gets_the_weights_and_its_share(cluster, stubs):
    cluster.update_weights(PARAMETERS, 2)
    stubs[0].restart()
    until(lambda: stubs[0].version == stubs[1].version)
    assert stubs[0].paths().count("/update_weights") == 3  # version 1, version 2, and version 2 after the restart
    for stub in stubs:
        slowly(stub, 0.02)
    until(lambda: all_used(cluster))
    before = shares(stubs)
    assert {each.policy_version for each in generate(cluster, prompts(40), SAMPLING, range(40))} == {2}
    assert min(now - earlier for now, earlier in zip(shares(stubs), before, strict=True)) >= FAIR_SHARE_AT_LEAST


def used_again_unless_given_up(engine):
    """Wait for the first server; it is given up if it failed more often than max_restarts before it was mended."""
    if not members(engine)[0].given_up:
        until(lambda: members(engine)[0].is_used)


def test_a_push_that_one_server_cannot_load_reaches_the_other(cluster, stubs):
    stubs[0].answers["/update_weights"] = 500, {"error": {"message": "out of cheese"}}
    cluster.update_weights(PARAMETERS, 2)
    assert {each.policy_version for each in generate(cluster, prompts(9), SAMPLING, range(9))} == {2}
    assert stubs[0].version.startswith("unfinished")
    stubs[0].answers["/update_weights"] = DONE
    used_again_unless_given_up(cluster)


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("nonsense", [[], {}, 3, {"choices": []}])
def test_a_server_that_does_not_confirm_a_step_of_a_push_is_left_out(cluster, stubs, path, nonsense):
    before = stubs[0].answers.get(path, DONE)
    stubs[0].answers[path] = 200, nonsense
    cluster.update_weights(PARAMETERS, 2)
    assert not members(cluster)[0].is_used
    assert stubs[0].version != stubs[1].version
    assert {each.policy_version for each in generate(cluster, prompts(9), SAMPLING, range(9))} == {2}
    stubs[0].answers[path] = before
    used_again_unless_given_up(cluster)


@pytest.mark.parametrize("answer", [None, (500, {"error": {"message": "busy"}})])
def test_a_server_that_may_still_be_paused_after_a_push_is_used_when_it_was_resumed(cluster, stubs, answer):
    stubs[0].answers["/resume"] = answer if answer else lambda body: None
    cluster.update_weights(PARAMETERS, 2)
    member = members(cluster)[0]
    assert stubs[0].version == stubs[1].version
    assert not member.is_used
    assert len(generate(cluster, prompts(9), SAMPLING, range(9))) == 9
    stubs[0].requested.clear()
    stubs[0].answers["/resume"] = DONE
    until(lambda: member.is_used or member.given_up)
    assert member.is_used
    assert set(stubs[0].paths()) <= {"/weight_info", "/resume"}  # it had the weights


def test_servers_that_compute_differently_with_equal_weights_end_the_run(cluster, stubs):
    def compute_differently(response):
        for position in response.get("prompt_logprobs", [None])[1:]:
            position.update({token: {"logprob": -1.5} for token in position})

    stubs[1].changes_answer(compute_differently)
    with pytest.raises(RunError, match=r"differ by 0\.5 nats .* it has damaged them, or has other settings"):
        cluster.update_weights(PARAMETERS, 2)


def test_weights_that_a_restarted_server_gets_have_their_own_label(cluster, stubs, monkeypatch):
    """The trainer pushes new weights while a server gets the last ones, and the new push fails there."""
    looked_at, goes_on, received = threading.Event(), threading.Event(), []
    inspect = cluster._inspect

    def slow_inspect(server):
        if server.url == stubs[0].url:
            looked_at.set()
            goes_on.wait(5)
        return inspect(server)

    def record():
        """Add the server's label and the sum of "w", which is first in the shared memory."""
        size = PARAMETERS[0][1].nbytes
        memory = cluster._push.transport._sender._shared.bytes
        received.append((stubs[0].version, float(memory[:size].view(torch.float32).sum())))

    monkeypatch.setattr(cluster, "_inspect", slow_inspect)
    stubs[0].before_answers("/update_weights", record)
    stubs[0].restart()
    looked_at.wait(5)
    threading.Timer(0.2, goes_on.set).start()
    second = [(name, tensor + 1) for name, tensor in PARAMETERS]
    cluster.update_weights(second, 2)
    until(lambda: members(cluster)[0].is_used)
    for label, total in received:
        pushed = second if label.endswith("version 2") else PARAMETERS
        assert total == float(pushed[0][1].sum())


def test_a_restarted_server_that_hangs_does_not_stop_the_run(ready_engine, stubs):
    engine = ready_engine([stub.url for stub in stubs], silent_seconds=0.3)
    slowly(stubs[0], 3, "/pause")
    stubs[0].restart()
    until(lambda: not members(engine)[0].is_used)
    began = time.monotonic()
    for version in (2, 3):
        engine.update_weights(PARAMETERS, version)
    assert time.monotonic() - began < 5  # less than the 3 s of both pushes
    assert {each.policy_version for each in generate(engine, prompts(9), SAMPLING, range(9))} == {3}
