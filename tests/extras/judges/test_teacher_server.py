"""A teacher on servers: requests and replies, compared with the same model as a role; faults."""

import copy
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import DistillationModule, Pretrained, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.extras.algorithms.remote_teachers import results
from lightning_rlhf.extras.judges.teacher_server import TeacherServer
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import PaddedPrompts, TopTokens
from tests.distributed.tasks import share_of_a, with_pictures
from tests.extras.servers.stub_server import StubServer
from tests.helpers import assert_close
from tests.stand_ins import TinyModel, fit, quiet_trainer, responses, rollout_of
from tests.vision_models import write_checkpoint

TEACHER = TinyModel(seed=7)
ROWS = responses(5, seed=8, observations=True)
LETTERS = CharacterTokenizer("abcdefg")


def completion(lm, extra=1):
    """Return the answer of vLLM to a request of prompt_logprobs, which contains the tokens of the text too."""

    def answer(body):
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad():
            logprobs = lm(ids).logits[0].log_softmax(-1)
        entries = [None]
        for position, token in enumerate(body["prompt"][1:]):
            row = logprobs[position]
            chosen = {int(i) for i in row.topk(body["prompt_logprobs"]).indices} | ({token} if extra else set())
            entries.append({str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": "x"} for i in chosen})
        return 200, {"choices": [{"prompt_logprobs": entries}], "usage": {"total_tokens": ids.numel()}}

    return answer


@pytest.fixture
def stubs():
    """Two servers of the teacher, whose tokens are those of the letters."""
    lm, tokenizer = TEACHER.causal().lm, LETTERS.load()
    servers = [StubServer() for _ in range(2)]
    for server in servers:
        server.answers["/v1/models"] = 200, {"data": [{"id": "teacher"}]}
        server.answers["/v1/completions"] = completion(lm)
        server.answers["/detokenize"] = lambda body: (200, {"prompt": tokenizer.decode(body["tokens"])})
    yield servers
    for server in servers:
        server.close()


def distilled(teacher, rollout=None):
    """Return a module after a step of plain gradient descent."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    module = DistillationModule(TinyModel(), teacher, Divergence(0.5, 3), optimizer=sgd, micro_batch_tokens=20)
    fit(module, [rollout_of(ROWS) if rollout is None else rollout])
    return module


def test_update_equals_that_with_the_teacher_as_a_role(stubs):
    expected = distilled(TEACHER)
    module = distilled(TeacherServer([stub.url for stub in stubs]))
    assert module.frozen_roles == ()
    for name, parameter in module.actor.named_parameters():
        assert_close(parameter, expected.actor.get_parameter(name), rtol=1e-5, atol=1e-6)
    counts = [sum(path == "/v1/completions" for path, _ in stub.requested) for stub in stubs]
    assert counts == [3, 2]  # the texts are distributed


def test_request_has_the_tokens_of_prompt_and_response(stubs):
    rollout, server = rollout_of(ROWS), TeacherServer([stubs[0].url], model="other")
    tokens = [future.result() for future in server.request(rollout, 2)]
    bodies = [body for path, body in stubs[0].requested if path == "/v1/completions"]
    assert sorted(body["prompt"] for body in bodies) == sorted(row.prompt + row.tokens for row in ROWS)
    assert {body["prompt_logprobs"] for body in bodies} == {2}
    assert {body["model"] for body in bodies} == {"other"}
    assert [tuple(each.ids.shape) for each in tokens] == [(len(row.tokens), 2) for row in ROWS]
    lm = TEACHER.causal().lm
    for row, each in zip(ROWS, tokens, strict=True):
        logprobs = lm(torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        top = logprobs.topk(2)
        assert torch.equal(each.ids, top.indices)
        assert_close(each.logprobs, top.values, atol=1e-5)
        assert_close(each.rest.exp(), 1 - top.values.exp().sum(-1), atol=1e-5)


def test_prompts_with_images_are_an_error_before_the_run(stubs, tmp_path):
    path = str(write_checkpoint("idefics3", tmp_path / "model"))
    rows = InMemory(with_pictures([{"prompt": "a"}, {"prompt": "b"}]))
    data = PromptDataModule(rows, tokenizer=path, batch_size=2, max_tokens=110)
    loop = RolloutLoop([RewardFunction(share_of_a)], TransformersEngine(), group_size=1, max_response_tokens=4)
    server = TeacherServer([stubs[0].url], model="teacher")
    module = DistillationModule(Pretrained(path), server, Divergence(0.5, 3), minibatch_size=2)
    with pytest.raises(UsageError, match="a TeacherServer reads texts only, and prompts have images"):
        quiet_trainer(max_steps=1, callbacks=[loop], default_root_dir=tmp_path).fit(module, datamodule=data)


def finished(*sizes):
    """Return the finished requests of responses of some lengths."""
    futures = [Future() for _ in sizes]
    for future, size in zip(futures, sizes, strict=True):
        future.set_result(TopTokens.of(torch.full((size, 2), size), torch.full((size, 2), -1.0)))
    return futures


def test_rows_of_other_lengths_are_padded():
    tokens = results(finished(1, 3), 4, 2)
    assert tokens.ids[:, :, 0].tolist() == [[1, 0, 0, 0], [3, 3, 3, 0]]
    assert_close(tokens.rest[1, :3], finished(3)[0].result().rest)
    assert results([], 4, 2).ids.shape == (1, 4, 2)


def test_waiting_is_logged_and_a_failure_is_raised_at_once(monkeypatch, caplog):
    monkeypatch.setattr("lightning_rlhf.processes.waiting.INTERVAL_SECONDS", 0.05)
    late, never = Future(), Future()
    threading.Timer(0.3, late.set_exception, [RuntimeError("the server is gone")]).start()
    with caplog.at_level("INFO"), pytest.raises(RuntimeError, match="the server is gone"):
        results([*finished(2), late, never], 4, 2)
    assert "Waiting for 2 of 3 texts with the teacher's log-probabilities for 0 s." in caplog.text


def test_request_is_sent_again_to_a_restarted_server(stubs):
    answer, breaks = stubs[0].answers["/v1/completions"], iter([True, True, False])
    stubs[0].answers["/v1/completions"] = lambda body: None if next(breaks, False) else answer(body)
    rollout = rollout_of(ROWS[:1])
    (future,) = TeacherServer([stubs[0].url], tries=5).request(rollout, 2)
    assert future.result().ids.shape == (len(ROWS[0].tokens), 2)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, {"error": "gone"}), "/v1/completions answered in the last of 1 tries: 500"),
        ((200, {"choices": [{}]}), "returned no log-probabilities of the prompt: is it a vLLM server"),
        (None, "/v1/completions gave no valid answer in 1 tries"),
    ],
)
def test_fault_of_a_server_ends_the_run_with_a_sentence(stubs, reply, message):
    stubs[0].answers["/v1/completions"] = reply if reply is None else (lambda body: reply)
    if reply is None:
        stubs[0].answers["/v1/completions"] = lambda body: None
    with pytest.raises(RuntimeError, match=message):
        distilled(TeacherServer([stubs[0].url], tries=1))


def test_server_with_fewer_log_probs_raises(stubs):
    answer = completion(TEACHER.causal().lm, extra=0)
    stubs[0].answers["/v1/completions"] = lambda body: answer({**body, "prompt_logprobs": 2})
    with pytest.raises(
        RuntimeError, match=r"returned 2 log-probabilities of a token, .* start it with --max-logprobs 3"
    ):
        distilled(TeacherServer([stubs[0].url], tries=1))


def changed(answer, change):
    """Return an answer whose entries are changed after the first one."""

    def answered(body):
        status, reply = answer(body)
        entries = reply["choices"][0]["prompt_logprobs"]
        reply["choices"][0]["prompt_logprobs"] = [None, *change(entries[1:])]
        return status, reply

    return answered


def with_values(value_of):
    return lambda entries: [
        {token: {"logprob": value_of(value["logprob"])} for token, value in entry.items()} for entry in entries
    ]


def another_key(key_of):
    return lambda entries: [{**entry, key_of(next(iter(entry))): {"logprob": -9.0}} for entry in entries]


def test_padding_tokens_of_the_teacher_are_left_out(stubs):
    stubs[0].answers["/v1/completions"] = completion(TEACHER.causal().lm)
    plain = distilled(TeacherServer([stubs[0].url], tries=1))
    padded = changed(completion(TEACHER.causal().lm), lambda entries: [e | {"11": {"logprob": -9.0}} for e in entries])
    stubs[0].answers["/v1/completions"] = padded
    module = distilled(TeacherServer([stubs[0].url], tries=1))
    for name, parameter in module.actor.named_parameters():
        assert torch.equal(parameter, plain.actor.get_parameter(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_values(lambda value: 3.0), r"a log-probability of 3, which log-probabilities cannot have: start it with"),
        (with_values(lambda value: float("nan")), r"a log-probability of nan"),
        (with_values(lambda value: float("-inf")), r"a log-probability of -inf"),
        (with_values(lambda value: -0.01), r"probabilities of \d tokens whose sum is [23]\.\d+, which log-prob"),
        (with_values(lambda value: value - 30), r"the \d most likely tokens with a probability of \d.*e-1\d, which"),
        (another_key(lambda token: f"0{token}"), r"token \d+ twice"),
        (another_key(lambda token: "99999"), r"token 99999, which is not one of the 11 tokens"),
        (another_key(lambda token: "-1"), r"token -1, which is not one of the 11 tokens"),
        (
            lambda entries: entries[1:] + entries[:1],
            r"the tokens .* without the text's own token \d+: they are of another position",
        ),
        (lambda entries: [*entries, *entries], r"log-probabilities of \d+ tokens, where those of \d+ were requested"),
    ],
)
def test_numbers_that_are_no_distribution_are_an_error_with_the_server(stubs, change, message):
    stubs[0].answers["/v1/completions"] = changed(completion(TEACHER.causal().lm), change)
    with pytest.raises(RuntimeError, match=rf"{stubs[0].url}/v1/completions returned {message}"):
        distilled(TeacherServer([stubs[0].url], tries=1))


def test_deeply_nested_reply_is_not_json(stubs):
    stubs[0].answers["/v1/completions"] = lambda body: (200, b"[" * 200_000)
    with pytest.raises(
        RuntimeError, match=r"gave no valid answer in 1 tries: UnreadableReply not JSON that can be read: its"
    ):
        distilled(TeacherServer([stubs[0].url], tries=1))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "raw_logprobs"])
def test_mode_that_a_server_returns_is_validated(stubs, mode):
    stubs[0].answers["/server_info"] = 200, {"vllm_config": {"model_config": {"logprobs_mode": mode}}}
    server = TeacherServer([stubs[0].url], tries=1)
    if mode == "raw_logprobs":
        server.check(LETTERS.load(), 1.0)
        return
    with pytest.raises(UsageError, match=rf"the teacher at {stubs[0].url} has --logprobs-mode {mode}, expected one of"):
        server.check(LETTERS.load(), 1.0)


def test_check_accepts_the_same_tokens_and_rejects_others(stubs):
    server = TeacherServer([stub.url for stub in stubs], tries=1)
    server.check(LETTERS.load(), 1.0)
    with pytest.raises(UsageError, match="at temperature 1, but the sampling has 0"):
        server.check(LETTERS.load(), 0.7)
    stubs[1].answers["/detokenize"] = lambda body: (200, {"prompt": "?"})
    with pytest.raises(
        UsageError, match=f"the teacher at {stubs[1].url} has another tokenizer: token 0 is '\\?' there"
    ):
        server.check(LETTERS.load(), 1.0)


def test_server_of_several_models_needs_a_name(stubs):
    stubs[0].answers["/v1/models"] = 200, {"data": [{"id": "a"}, {"id": "b"}]}
    with pytest.raises(UsageError, match=r"serves the models \['a', 'b'\]: set model of the TeacherServer"):
        TeacherServer([stubs[0].url]).check(LETTERS.load(), 1.0)


def test_replies_other_than_objects_raise(stubs):
    stubs[0].answers["/v1/models"] = 200, []
    with pytest.raises(RuntimeError, match=r"/v1/models did not return a JSON object: is it a vLLM server\?"):
        TeacherServer([stubs[0].url]).check(LETTERS.load(), 1.0)


@pytest.mark.parametrize("urls", [[], "http://127.0.0.1:1"])
def test_addresses_that_are_not_a_list_raise(urls):
    with pytest.raises(UsageError, match="urls of a TeacherServer must be a list of at least one address"):
        TeacherServer(urls)


def test_whole_distributions_of_a_server_raise():
    with pytest.raises(UsageError, match="a TeacherServer returns the most likely tokens only"):
        DistillationModule(TinyModel(), TeacherServer(["http://127.0.0.1:1"]))


def test_copies_of_a_module_share_the_server():
    server = TeacherServer(["http://127.0.0.1:1"])
    assert copy.deepcopy(server) is server


def test_prompt_of_the_teacher_is_sent(stubs):
    rollout = rollout_of(ROWS)
    longer = replace(rollout, teacher=PaddedPrompts(torch.full((5, 2), 4), torch.full((5,), 2)))
    distilled(TeacherServer([stubs[0].url]), longer)
    prompts = [body["prompt"] for path, body in stubs[0].requested if path == "/v1/completions"]
    assert sorted(prompts) == sorted([4, 4, *row.tokens] for row in ROWS)
