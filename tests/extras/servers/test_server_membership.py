"""Several vLLM servers as one engine: which servers belong to it, and which are rejected."""

import time

import pytest

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.servers.engine import VLLMServerEngine
from lightning_rlhf.extras.servers.servers import Addresses
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


@pytest.mark.parametrize("path", ["/server_info", "/version"])
@pytest.mark.parametrize("nonsense", [None, [], {}, {"vllm_config": 3}])
def test_a_server_that_describes_itself_by_nonsense_is_not_used(ready_engine, stubs, path, nonsense):
    stubs[0].answers[path] = 200, nonsense
    engine = ready_engine([stub.url for stub in stubs])
    generate(engine, prompts(9), SAMPLING, range(9))
    assert shares(stubs) == [0, 9]


def test_servers_join_and_leave_between_steps(ready_engine, stubs, tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text(f"{stubs[0].url}\n")
    engine = ready_engine(str(file))
    generate(engine, prompts(9), SAMPLING, range(9))
    assert shares(stubs) == [9, 0]
    file.write_text(f"{stubs[0].url}\n\n{stubs[1].url}/\n")
    engine.update_weights(PARAMETERS, 2)
    until(lambda: all_used(engine))
    for stub in stubs:
        slowly(stub, 0.02)
    generate(engine, prompts(40), SAMPLING, range(40))
    assert min(shares(stubs)) >= FAIR_SHARE_AT_LEAST
    file.write_text(f"{stubs[1].url}\n")
    engine.update_weights(PARAMETERS, 3)
    before = shares(stubs)
    assert {each.policy_version for each in generate(engine, prompts(9), SAMPLING, range(9))} == {3}
    assert shares(stubs) == [before[0], before[1] + 9]
    file.write_text("")
    engine.update_weights(PARAMETERS, 4)
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    assert engine.restarted == 0


def test_a_server_that_joins_with_unsuitable_settings_is_not_used(ready_engine, stubs, tmp_path):
    stubs[1].config["model_config"]["dtype"] = "torch.bfloat16"
    file = tmp_path / "servers.txt"
    file.write_text(stubs[0].url)
    engine = ready_engine(str(file))
    file.write_text(f"{stubs[0].url}\n{stubs[1].url}")
    engine.update_weights(PARAMETERS, 2)
    until(lambda: members(engine)[1].given_up)
    assert "--dtype float32, not torch.bfloat16" in str(members(engine)[1].cause)
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    assert stubs[1].version == "default"


def test_servers_with_other_transfers_or_settings_are_rejected_before_the_run(ready_engine, stubs):
    stubs[1].config["weight_transfer_config"] = {"backend": "nccl"}
    with pytest.raises(ValueError, match="with the backend shared_memory of the other servers, not nccl"):
        ready_engine([stub.url for stub in stubs])


def test_the_run_starts_with_the_servers_that_respond(ready_engine, stubs):
    stubs[1].close()
    engine = ready_engine([stub.url for stub in stubs])
    assert len(generate(engine, prompts(9), SAMPLING, range(9))) == 9
    assert shares(stubs) == [9, 0]


def test_servers_with_the_weights_of_an_earlier_run_are_used(ready_engine, stubs):
    for stub in stubs:
        stub.version = "run 1234, version 12"
        stub.before_answers("/pause", lambda: time.sleep(0.3))  # they are looked at meanwhile
    engine = ready_engine([stub.url for stub in stubs])
    assert [member.given_up for member in members(engine)] == [False, False]
    assert len(generate(engine, prompts(20), SAMPLING, range(20))) == 20
    assert min(shares(stubs)) > 0


def test_invalid_lines_are_ignored_after_the_start(ready_engine, stubs, tmp_path, monkeypatch):
    monkeypatch.setenv("JOB", "7")
    file = tmp_path / "servers-7.txt"
    file.write_text(stubs[0].url)
    engine = ready_engine(str(tmp_path / "servers-$JOB.txt"))
    no_scheme, bad_brackets, without_key = "10.0.0.7:8000", "http://fe80::1:8000", "http://10.0.0.7:8000"
    file.write_text(f"# all\n{stubs[0].url}\n{no_scheme}\n{bad_brackets}\n{without_key}\n")
    engine.update_weights(PARAMETERS, 2)  # a server on another machine needs a key
    assert len(members(engine)) == 1
    file.write_text(no_scheme)
    with pytest.raises(UsageError, match=r"looks like http://127\.0\.0\.1:8000, got '10"):
        ready_engine(str(file))


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
