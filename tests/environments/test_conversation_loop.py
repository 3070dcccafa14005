"""Conversations of engines with environments: rows, order, faults."""

import gc
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import EnvironmentSettings, MarkedToolCalls, Tools
from lightning_rlhf.environments.bridges import PlainBridge
from lightning_rlhf.models.loading import save_architecture
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.conversations import ConversationRequest, ConversationSampler
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import CompletionCheck, serve
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import Prompt, SamplingParams
from tests.environments import worlds
from tests.environments.spy import Spy
from tests.stand_ins import VOCABULARY, ScriptedEngine, TinyModel

LETTERS = CharacterTokenizer("abcdefgh").load()
END = LETTERS.eos_token_id


def requests(count, row=None, max_tokens=24, turns=8):
    sampling = SamplingParams(max_tokens, 1.0, stop_token_ids=(END,))
    return [
        ConversationRequest(
            prompt=Prompt([4 + i % 5, 3], "ab", columns=row or {}),
            seed=i // 2,
            turn_seeds=tuple(range(i * 9, i * 9 + turns)),
            sampling=sampling,
        )
        for i in range(count)
    ]


def with_prompt(request, **changes):
    return replace(request, prompt=replace(request.prompt, **changes))


@pytest.fixture
def converse():
    """Run conversations with an engine and close the environments."""
    samplers = []

    def converse(engine, requested, on_finished=None, **settings):
        settings = EnvironmentSettings(**({"bridge": "plain", "max_turns": 4} | settings))
        samplers.append(ConversationSampler(settings, settings.make_bridge(LETTERS, {}), LETTERS))
        check = CompletionCheck(100, engine.version if isinstance(engine, ScriptedEngine) else 0, 10**6)
        return serve(engine, requested, partial(samplers[-1], check=check), on_finished).result()

    yield converse
    for sampler in samplers:
        sampler.close()


def ids(text):
    return LETTERS(text, add_special_tokens=False)["input_ids"]


def test_turn_that_the_bridge_cannot_continue_ends_its_conversation(converse, monkeypatch):
    """The bridge receives the turn and all earlier ones."""
    got = []

    def between(self, turn, written, before):
        got.append((turn, before))
        return self.ids("h") if len(got) == 1 else None

    monkeypatch.setattr(PlainBridge, "between", between)
    (instance,) = converse(Spy(LETTERS, ["ab"]), requests(1), factory=worlds.Echo, timeout_s=None)
    output = [*ids("ab"), END]
    assert got == [(output, [4, 3]), (output, [4, 3, *output, *ids("h")])]
    assert instance.token_ids == [*output, *ids("h"), *output]
    record = instance.conversation
    assert (record.stop, record.turn_ends, record.turn_rewards) == ("malformed", [3, 7], [0.0, 0.0])
    assert [message["role"] for message in record.messages] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_row_contains_exactly_the_requests_and_answers_of_the_engine(converse, timeout_s):
    engine = Spy(LETTERS, ["ab"])
    (instance,) = converse(engine, requests(1), factory=worlds.Echo, timeout_s=timeout_s, max_turns=3)
    output, written = [*ids("ab"), END], ids("ab")
    assert engine.prompts == [[4, 3], [4, 3, *output, *written], [4, 3, *output, *written, *output, *written]]
    assert instance.token_ids == [*output, *written, *output, *written, *output]
    assert instance.sampled == (True,) * 3 + (False,) * 2 + (True,) * 3 + (False,) * 2 + (True,) * 3
    assert instance.logprobs == [-1.0 if sampled else 0.0 for sampled in instance.sampled]
    record = instance.conversation
    assert (record.stop, record.turn_ends, record.prompt_ids) == ("max_turns", [3, 8, 13], [4, 3])
    roles = ["assistant", "user", "assistant", "user", "assistant"]
    assert record.messages == [{"role": role, "content": "ab"} for role in roles]


def test_rewards_metrics_and_ends_of_turns_are_recorded(converse):
    engine = Spy(LETTERS, ["d"])
    first, _, second, _ = converse(
        engine, [replace(request, seed=3 + request.seed) for request in requests(4)], factory=worlds.Guess
    )
    assert (first.conversation.stop, first.conversation.turn_rewards) == ("done", [1.0])
    assert first.conversation.metrics == {"found": 1.0}
    assert (second.conversation.stop, second.conversation.turn_rewards) == ("max_turns", [-0.125] * 4)


def test_initial_messages_belong_to_the_prompt(converse):
    engine = Spy(LETTERS, ["ab"])
    (instance,) = converse(engine, requests(1, {"greeting": "hg"}), factory=worlds.Greets, max_turns=1)
    assert engine.prompts == [[*ids("ab"), *ids("hg")]]
    assert instance.conversation.prompt_ids == [*ids("ab"), *ids("hg")]
    assert instance.token_ids == [*ids("ab"), END]
    assert instance.conversation.messages[0] == {"role": "user", "content": "hg"}


def test_prompt_without_room_for_a_turn_is_a_failure(converse):
    with pytest.raises(RuntimeError, match="lengthen the prompt by 30 tokens, but max_response_tokens 24 must contain"):
        converse(Spy(LETTERS, ["ab"]), requests(1, {"greeting": "h" * 30}), factory=worlds.Greets)


def test_tool_results_and_mistakes_are_messages(converse):
    tools = {"factory": Tools, "arguments": {"functions": [worlds.lookup]}, "timeout_s": None}
    parser = MarkedToolCalls("lookup", "key", start="g", end="h")
    for output, result in (("gkh", "v"), ("gah", "Error: no entry 'a'")):
        tokenizer = CharacterTokenizer("abcdefghkv").load()
        engine = ScriptedEngine([output, "a"], tokenizer)
        settings = EnvironmentSettings(**tools, parser=parser, bridge="plain", max_turns=1)
        sampler = ConversationSampler(settings, PlainBridge(tokenizer), tokenizer)
        (instance,) = serve(engine, requests(1), partial(sampler, check=CompletionCheck(100, -1, 100)), None).result()
        sampler.close()
        assert instance.conversation.tool_calls == 1
        assert instance.conversation.metrics == {"tool_errors": float(result != "v")}


# -- order ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A transformers engine with a small model."""
    source = TinyModel()
    directory = tmp_path_factory.mktemp("engine")
    save_architecture(source, directory)
    engine = TransformersEngine(batch_size=3)
    engine.start(EngineSetup(directory, "float32", 64, directory / "log"))
    engine.wait()
    engine.update_weights(whole_tensors(source.causal().lm), 0)
    yield engine
    engine.close()


def small(count, **options):
    return [
        replace(request, prompt=Prompt([1 + request.prompt.token_ids[0] % 5], "ab"))
        for request in requests(count, **options)
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("options", [{"timeout_s": None}, {"concurrency": 1}, {"factory": worlds.SlowEcho}])
def test_host_of_the_environments_does_not_change_a_bit(converse, engine, options):
    expected = converse(engine, small(8), factory=worlds.Echo, concurrency=4)
    instance = converse(engine, small(8), **({"factory": worlds.Echo} | options))
    assert [each.token_ids for each in instance] == [each.token_ids for each in expected]
    assert [each.logprobs for each in instance] == [each.logprobs for each in expected]
    assert len({tuple(each.token_ids) for each in instance}) > 4


@pytest.mark.slow
def test_reordered_and_separate_requests_give_the_same_conversations(converse, engine):
    together = converse(engine, small(6), factory=worlds.Echo)
    backwards = converse(engine, small(6)[::-1], factory=worlds.Echo)[::-1]
    alone = [converse(engine, [item], factory=worlds.Echo)[0] for item in small(6)]
    assert VOCABULARY > 8
    for first, second, third in zip(together, backwards, alone, strict=True):
        assert first.token_ids == second.token_ids == third.token_ids
        assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_failure_ends_the_run_with_the_traceback_of_the_environment(converse):
    with pytest.raises(RuntimeError, match=r"(?s)Misbehaves raised ValueError: a broken world.*on_error.*do_raise"):
        converse(Spy(LETTERS, ["ab"]), requests(2, {"fault": "raise"}), factory=worlds.Misbehaves)


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["skip", "zero", "end"])
def test_misbehaving_environments_do_not_end_a_run_or_change_other_conversations(converse, on_error):
    names = list(worlds.FAULTS)
    requested = [
        with_prompt(request, columns={"fault": names[i // 2] if i % 2 else ""})
        for i, request in enumerate(requests(2 * len(names)))
    ]
    rows = converse(
        Spy(LETTERS, ["ab"]), requested, factory=worlds.Misbehaves, on_error=on_error,
        timeout_s=2.0, concurrency=2, max_turns=3,
    )  # fmt: skip
    kinds = {name: rows[2 * i + 1].conversation.fault for i, name in enumerate(names)}
    assert kinds == worlds.FAULTS
    assert len(kinds) >= 40
    for good, bad in zip(rows[::2], rows[1::2], strict=True):
        assert (good.token_ids, good.sampled) == (rows[0].token_ids, rows[0].sampled)
        assert good.conversation.messages == rows[0].conversation.messages
        assert (good.conversation.fault, good.conversation.stop) == (None, "max_turns")
        assert bad.conversation.stop == "fault"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("act", ["print", "fork", "gigabyte", "chdir", "seed", "environ", "close"])
def test_unusual_valid_behaviour_is_not_a_failure(converse, act):
    (instance,) = converse(Spy(LETTERS, ["ab"]), requests(1, {"act": act}), factory=worlds.Harmless, max_turns=3)
    assert instance.conversation.fault is None
    assert instance.conversation.stop == ("tokens" if act == "gigabyte" else "max_turns")


def test_non_repeatable_environment_is_reported_as_a_failure(converse):
    requested = requests(2)
    rows = converse(
        Spy(LETTERS, ["ab"]), requested, factory=worlds.Unsteady, on_error="end", max_error_rate=1.0,
        concurrency=1, max_turns=2,
    )  # fmt: skip
    assert sorted(row.conversation.fault for row in rows) == ["died", "replay"]


def test_too_many_failures_end_the_run(converse):
    requested = [
        with_prompt(request, columns={"fault": "raise" if i < 2 else ""}) for i, request in enumerate(requests(3))
    ]
    with pytest.raises(RuntimeError, match=r"failed in 2 of 3 conversations, more than its max_error_rate of 0.5"):
        converse(Spy(LETTERS, ["ab"]), requested, factory=worlds.Misbehaves, on_error="skip")


def test_failure_at_the_start_leaves_an_empty_turn(converse):
    requested = requests(1, {"fault": "reset"})
    (instance,) = converse(
        Spy(LETTERS, ["ab"]), requested, factory=worlds.Misbehaves, on_error="zero", max_error_rate=1.0
    )
    assert (instance.conversation.stop, instance.conversation.fault, instance.conversation.turn_rewards) == (
        "fault",
        "error",
        [0.0],
    )
    assert instance.token_ids == [*ids("ab"), END]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"timeout_s": None}, {"factory": worlds.SlowEcho}])
def test_thousand_conversations_leave_no_resources(options):
    instance = psutil.Process()

    def present():
        return {child.pid for child in instance.children(recursive=True)}, instance.num_fds()

    for count in (10, 1000):  # the first ones may start what stays, such as a resource tracker
        settings = EnvironmentSettings(**({"factory": worlds.Echo, "bridge": "plain", "max_turns": 3} | options))
        sampler = ConversationSampler(settings, PlainBridge(LETTERS), LETTERS)
        gc.collect()  # what earlier tests left must not be freed meanwhile
        before = present()
        engine = ScriptedEngine(["ab"], LETTERS)
        check = CompletionCheck(100, -1, 10**6)
        result = serve(engine, requests(count), partial(sampler, check=check), None).result()
        assert len(result) == count
        environments = getattr(sampler.host, "_environments", None)  # of threads; processes end with theirs
        sampler.close()
        deadline = time.monotonic() + 10
        while count == 1000 and present() != before and time.monotonic() < deadline:
            time.sleep(0.1)
    assert present() == before
    assert environments is None or environments.keys == []


# -- the chat template ------------------------------------------------------------------------------------------------


@pytest.fixture
def chat():
    """Run conversations whose environment writes messages for a chat template in which roles must alternate."""
    tokenizer = CharacterTokenizer("abcdefgh<>u", chat=True).load()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' and loop.index0 is odd %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}<u>{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    samplers = []

    def chat(factory, requested, texts=("ab",), **settings):
        settings = EnvironmentSettings(factory, **({"max_turns": 3, "timeout_s": None} | settings))
        samplers.append(ConversationSampler(settings, settings.make_bridge(tokenizer, {}), tokenizer))
        engine = Spy(tokenizer, list(texts))
        check = partial(samplers[-1], check=CompletionCheck(100, engine.version, 10**6))
        return serve(engine, requested, check, None).result(), tokenizer

    yield chat
    for sampler in samplers:
        sampler.close()


@pytest.mark.parametrize("empty", ["", "reply", "list"])
def test_empty_reply_is_an_empty_message(chat, empty):
    (instance,), tokenizer = chat(worlds.Empty, requests(1, {"reply": empty}, max_tokens=64))
    assert instance.conversation.stop == "max_turns"
    text = tokenizer.decode(instance.token_ids, clean_up_tokenization_spaces=False)
    assert text == "ab</s><u></s><a>ab</s><u></s><a>ab</s>"
    roles = [(message["role"], message["content"]) for message in instance.conversation.messages]
    assert roles == [("assistant", "ab"), ("user", "")] * 2 + [("assistant", "ab")]


def test_empty_reply_to_a_tool_call_is_an_empty_result(converse):
    parser = MarkedToolCalls("t", "x", start="a", end="b")
    (instance,) = converse(
        Spy(LETTERS, ["acb"]), requests(1, {"reply": ""}), factory=worlds.Empty, parser=parser, max_turns=2
    )
    assert instance.conversation.messages[1] == {"role": "tool", "content": ""}


def test_messages_that_the_template_rejects_are_a_failure_of_the_environment(chat):
    requested = [
        with_prompt(request, columns={"count": 1 + i % 2}) for i, request in enumerate(requests(4, max_tokens=64))
    ]
    rows, _ = chat(worlds.SeveralMessages, requested, on_error="end")
    assert [row.conversation.fault for row in rows] == [None, "invalid"] * 2
    assert [len(row.conversation.turn_ends) for row in rows] == [3, 1, 3, 1]
    assert rows[1].conversation.turn_rewards == [0.0]
    with pytest.raises(RuntimeError, match=r"SeveralMessages returned messages that cannot .* roles must alternate"):
        chat(worlds.SeveralMessages, requested)


def test_initial_messages_that_the_template_rejects_are_a_failure(chat):
    requested = [
        with_prompt(request, messages=[{"role": "user", "content": "a"}], columns={"greeting": "b"})
        for request in requests(1)
    ]
    (instance,), _ = chat(worlds.Greets, requested, on_error="zero", max_error_rate=1.0)
    assert (instance.conversation.fault, instance.conversation.stop) == ("invalid", "fault")


# -- the last call ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "timeout_s"),
    [
        (worlds.Counts, 30.0),
        (worlds.Counts, None),
        (worlds.CountsInLoop, 30.0),
        (worlds.make_counts, None),
    ],
)
@pytest.mark.parametrize(
    ("text", "limits", "stop", "reward"),
    [
        ("aa", {"max_turns": 2}, "max_turns", 4.0),
        ("aaa", {"max_turns": 9}, "tokens", 15.0),  # 24 tokens: 4 for each turn, 1 between
        ("aab", {"max_turns": 9, "max_turn_tokens": 3}, "truncated", 200.0),
    ],
)
def test_conversation_ended_by_a_limit_gets_a_final_reward(converse, factory, timeout_s, text, limits, stop, reward):
    (instance,) = converse(Spy(LETTERS, [text]), requests(1), factory=factory, timeout_s=timeout_s, **limits)
    record = instance.conversation
    assert (record.stop, sum(record.turn_rewards), record.turn_rewards[-1]) == (stop, reward, reward)
    assert record.metrics == {"asked": 1.0, stop: 1.0}
    assert len(record.turn_rewards) == len(record.turn_ends)


def test_conversation_ended_by_the_environment_has_no_final_call(converse):
    (instance,) = converse(Spy(LETTERS, ["g"]), requests(1), factory=worlds.Counts)
    assert (instance.conversation.stop, instance.conversation.metrics) == ("done", {})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("on_error", "reward"), [("end", 0.0), ("zero", 0.0), ("skip", 0.0)])
def test_failure_of_the_final_call_keeps_the_reason_of_the_end(converse, on_error, reward):
    settings = {"factory": worlds.Counts, "arguments": {"fault": True}, "max_turns": 2, "max_error_rate": 1.0}
    (instance,) = converse(Spy(LETTERS, ["aa"]), requests(1), on_error=on_error, **settings)
    record = instance.conversation
    assert (record.stop, record.fault, record.turn_rewards) == ("max_turns", "error", [0.0, reward])
    with pytest.raises(RuntimeError, match="Counts raised ValueError: no end max_turns"):
        converse(Spy(LETTERS, ["aa"]), requests(1), **settings)


@pytest.mark.parametrize(("value", "fault"), [(None, None), (2, None), ("text", "invalid"), (True, "invalid")])
def test_final_call_returns_a_number_a_reply_or_nothing(converse, value, fault):
    requested = requests(1, {"value": value})
    (instance,) = converse(
        Spy(LETTERS, ["aa"]), requested, factory=worlds.FinishesWith, max_turns=1, on_error="end", max_error_rate=1.0
    )
    assert instance.conversation.fault == fault
    assert instance.conversation.turn_rewards == [2.0 if value == 2 else 0.0]


def test_conversation_gets_a_final_reward_after_its_process_was_lost(converse):
    requested = [replace(request, seed=i) for i, request in enumerate(requests(4))]
    rows = converse(
        Spy(LETTERS, ["aa"]), requested, factory=worlds.DiesOnce, concurrency=1, max_turns=2, on_error="end"
    )  # fmt: skip
    assert [row.conversation.fault for row in rows] == [None, "died", None, None]
    assert [sum(row.conversation.turn_rewards) for row in rows] == [4.0, 0.0, 4.0, 4.0]


class EndsWithText(Spy):
    """Its turns end with the last token of their text."""

    def generate(self, prompts, sampling, seeds):
        completions = super().generate(prompts, sampling, seeds)
        return [replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1]) for c in completions]


def test_an_end_that_is_text_is_a_part_of_the_turn(converse):
    """Such as ``</tool_call>``, at which generation stops and for which parsers look."""
    letter = ids("c")[0]
    requested = [replace(requests(1)[0], sampling=SamplingParams(24, 1.0, stop_token_ids=(END, letter)))]
    (row,) = converse(EndsWithText(LETTERS, ["abc"]), requested, factory=worlds.Echo, max_turns=1)
    assert row.conversation.messages[-1]["content"] == "abc"
