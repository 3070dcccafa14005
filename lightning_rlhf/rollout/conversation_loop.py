"""Conversations of a policy with environments: the next turn of each is requested while others are generated."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.image_parts import images_of
from lightning_rlhf.data.tokenizers import special_ids
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments.bridges import Bridge
from lightning_rlhf.environments.conversation import Conversation, Limits
from lightning_rlhf.environments.host import Call, Fault, Host
from lightning_rlhf.environments.live import digest_of
from lightning_rlhf.environments.parsing import ParsedTurn
from lightning_rlhf.environments.protocol import Message, Reply, Turn
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import RunError, UsageError, counted
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.generation import CompletionCheck, OnFinished
from lightning_rlhf.types import Completion, ConversationRecord, Prompt, SamplingParams, TokenPrompt

log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0
_LOG_SECONDS = 60.0


@dataclass(frozen=True)
class ConversationRequest:
    """Request of one conversation.

    Args:
        seed: seed of the environment, in [0, 2**63).
        turn_seeds: seed of each turn of the policy.
        sampling: sampling parameters, whose ``max_tokens`` limits the tokens after the prompt.
    """

    prompt: Prompt
    seed: int
    turn_seeds: tuple[int, ...]
    sampling: SamplingParams

    @property
    def row(self) -> dict[str, Any]:
        """The prompt's row as an environment receives it: its columns, ``prompt`` as text, and ``messages``."""
        return {**self.prompt.columns, "prompt": self.prompt.text, "messages": list(self.prompt.messages)}


@dataclass
class RunningConversation:
    """State of one conversation.

    Args:
        index: number of its request.
        request: its request.
        conversation: its tokens.
        key: name at the host of the environments.
        turns: turns that the environment has got.
        replies: digests of the environment's replies, that of ``reset`` first.
        rewards: reward of ``reset``, then of each turn.
        messages: all messages of the environment and turns of the policy.
        metrics: sums of the metrics of the replies.
        malformed: number of turns with malformed tool calls.
        fault: failure of the environment that ended it.
        called_at: time of the call that runs, in seconds of ``time.perf_counter``.
        environment_s: seconds in the environment.
        text_starts: beginnings of further branches of an agent; see :class:`ConversationRecord`.
    """

    index: int
    request: ConversationRequest
    conversation: Conversation
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    turns: list[Turn] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=lambda: [0.0])
    messages: list[Message] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    malformed: int = 0
    fault: Fault | None = None
    called_at: float = 0.0
    environment_s: float = 0.0
    text_starts: list[int] = field(default_factory=list)


def request_turns(
    engine: RolloutEngine,
    conversations: Sequence[Conversation],
    sampling: Sequence[SamplingParams],
    seeds: Sequence[int],
) -> list[Future[Completion]]:
    """Request the next turn of conversations, with the images of their prompts.

    Args:
        engine: engine that was started.
        conversations: conversations that continue.
        sampling: sampling parameters of each turn.
        seeds: seed of each turn.
    """
    return engine.request([conversation.request for conversation in conversations], sampling, seeds)


class ConversationLoop:
    """Runs the conversations of some requests to their ends.

    Args:
        settings: environment and its limits.
        host: host of the environments.
        engine: engine that generates the turns.
        on_finished: callback with the index of a request and its conversation as soon as it has ended.
        check: validation of each turn.
        bridge: conversion of messages to tokens.
        tokenizer: tokenizer that decodes turns.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        host: Host,
        engine: RolloutEngine,
        on_finished: OnFinished | None,
        check: CompletionCheck,
        bridge: Bridge,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._settings = settings
        self._host = host
        self._engine = engine
        self._on_finished = on_finished
        self._check = check
        self._bridge = bridge
        self._tokenizer = tokenizer
        self._events = SimpleQueue[Callable[[], None]]()  # what happened, for the thread of the loop
        self._ready: list[RunningConversation] = []  # conversations whose next turn can be requested
        self._count = 0  # of conversations
        self._calls = 0  # calls of environments that have not returned
        self._completions: dict[int, Completion] = {}
        self._faults: list[tuple[int, Fault]] = []

    def run(self, requests: Sequence[ConversationRequest]) -> list[Completion]:
        """Run all conversations to their ends and return their completions in order."""
        self._count = len(requests)
        running = [
            RunningConversation(i, each, Conversation(each.prompt.tokens, self._limits(each)))
            for i, each in enumerate(requests)
        ]
        began = logged = time.monotonic()
        try:
            for conversation in running:
                self._start(conversation)
            while len(self._completions) < len(running):
                # An engine that generates at once gets as many turns together as possible.
                if self._ready and (self._engine.traits.overlaps or not self._calls):
                    self._request_turns()
                if self._handle_events():
                    continue
                self._host.end_overdue()
                if time.monotonic() - logged > _LOG_SECONDS:
                    logged = time.monotonic()
                    missing = f"{len(running) - len(self._completions)} of {len(running)}"
                    log.info("Waiting for %s conversations for %.0f s.", missing, logged - began)
            return [self._completions[index] for index in range(len(running))]
        finally:
            for conversation in running:
                if conversation.index not in self._completions:
                    self._release(conversation)

    def _handle_events(self) -> int:
        """Wait for an event, but not long, and handle all that have happened; return their number."""
        events, seconds = 0, _CHECK_SECONDS
        with contextlib.suppress(Empty):
            while True:
                self._events.get(timeout=seconds)()
                events, seconds = events + 1, 0.0
        return events

    def _limits(self, request: ConversationRequest) -> Limits:
        settings = self._settings
        return Limits(settings.max_turns, request.sampling.max_tokens, settings.max_turn_tokens, settings.max_images)

    def _start(self, running: RunningConversation) -> None:
        """Start the environment of a conversation."""
        self._call_environment(running)

    def _release(self, running: RunningConversation) -> None:
        """Close the environment of a conversation."""
        self._host.release(running.key)

    # -- turns ------------------------------------------------------------------------------------------------

    def _request_turns(self) -> None:
        """Request the next turn of all conversations that are ready."""
        ready, self._ready = sorted(self._ready, key=lambda running: running.index), []
        futures = request_turns(
            self._engine,
            [running.conversation for running in ready],
            [replace(running.request.sampling, max_tokens=self._turn_budget(running)) for running in ready],
            [running.request.turn_seeds[len(running.turns)] for running in ready],
        )
        for running, future in zip(ready, futures, strict=True):
            self._notify(self._on_turn, running, future)

    def _turn_budget(self, running: RunningConversation) -> int:
        """Return the largest number of tokens of the next turn."""
        return running.conversation.turn_budget

    def _notify(
        self, handle: Callable[[RunningConversation, Any], None], running: RunningConversation, future: Future[Any]
    ) -> None:
        future.add_done_callback(lambda done: self._events.put(lambda: handle(running, done.result())))

    def _on_turn(self, running: RunningConversation, completion: Completion) -> None:
        """Append a turn, and pass it to the environment if the conversation continues."""
        self._check.check_one(completion)
        conversation = running.conversation
        conversation.add_turn(completion)
        turn = self._turn_of(running, completion)
        if running.fault is not None:
            conversation.end("fault")
        if conversation.stop is not None:
            running.messages.append({"role": "assistant", "content": turn.text})
            running.rewards += [0.0] * (len(conversation.turn_ends) + 1 - len(running.rewards))
            self._end(running, turn)
            return
        running.turns.append(turn)
        running.malformed += turn.malformed is not None
        calls = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in turn.calls]
        running.messages.append({"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})})
        self._call_environment(running)

    def _turn_of(self, running: RunningConversation, completion: Completion) -> Turn:
        """Decode a turn and parse its tool calls."""
        ids = completion.token_ids
        ends = {self._tokenizer.eos_token_id, *running.request.sampling.stop_token_ids} & special_ids(self._tokenizer)
        ids = ids[:-1] if ids[-1] in ends else ids  # an end that is text, such as </tool_call>, is a part of the turn
        raw, text = (
            str(self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
            for skip in (False, True)
        )
        parser = self._settings.parser
        parsed = ParsedTurn(text) if parser is None or running.conversation.stop else parser(raw, self._tokenizer)
        return Turn(parsed.text, parsed.calls, parsed.malformed, len(running.turns), raw)

    # -- environments -----------------------------------------------------------------------------------------

    def _call_environment(self, running: RunningConversation) -> None:
        """Start the environment, or pass it the last turn."""
        self._call_host(running, self._on_reply)

    def _call_host(
        self, running: RunningConversation, handle: Callable[[RunningConversation, Any], None], **call: Any
    ) -> None:
        """Start a call of a conversation's environment or agent.

        Args:
            running: conversation.
            handle: method that gets the result.
            **call: further arguments of :class:`Call`.
        """
        running.called_at = time.perf_counter()
        self._calls += 1
        request = running.request
        made = Call(running.key, request.row, request.seed, tuple(running.turns), tuple(running.replies), **call)
        self._notify(handle, running, self._host.call(made))

    def _on_reply(self, running: RunningConversation, reply: Reply | Fault) -> None:
        """Append the messages of an environment, and request the next turn if the conversation continues."""
        self._calls -= 1
        running.environment_s += time.perf_counter() - running.called_at
        if isinstance(reply, Reply):
            try:
                reply = self._append(running, reply) if running.turns else self._begin(running, reply)
            except UsageError as error:  # the chat template rejects the messages
                reply = Fault("invalid", f"returned messages that cannot be appended to the conversation: {error}")
        if isinstance(reply, Fault):
            self._on_fault(running, reply)
            return
        running.replies.append(digest_of(reply))
        if running.turns:
            running.rewards.append(reply.reward)
        else:
            running.rewards[0] = reply.reward
        _add_metrics(running, reply)
        self._continue(running)

    def _append(self, running: RunningConversation, reply: Reply) -> Reply:
        """Append the messages of a reply to a turn, or end the conversation; a reply without messages has an empty one.

        Raises:
            UsageError: the bridge does not allow the messages.
        """
        conversation = running.conversation
        if reply.done:
            conversation.end("done")
        elif conversation.has_all_turns:  # messages after the last turn need not suit the template
            conversation.end("max_turns")
        else:
            role = "tool" if running.turns[-1].calls else "user"
            written = _as_messages(reply.messages, role) or [{"role": role, "content": ""}]
            images = self._images_of(written)
            if not conversation.may_have(len(images)):  # before they are expanded to tokens
                conversation.end("images")
                return reply
            turn, before = conversation.last_turn
            ids = self._bridge.between(turn, written, before)
            unexpanded = self._bridge.between(turn, written, before, expanded=False) if images else None
            conversation.add_written(ids, images, unexpanded)
            if conversation.stop is None:
                running.messages += written
        return reply

    def _begin(self, running: RunningConversation, reply: Reply) -> Reply | Fault:
        """Append the messages of ``reset`` to the prompt; arguments and errors are those of :meth:`_append`."""
        if reply.done:
            return Fault("invalid", "reset() returned done=True: a conversation has at least one turn")
        request, written = running.request, _as_messages(reply.messages, "user")
        messages = list(request.prompt.messages)
        if not written:
            last = messages[-1]["role"] if messages else "user"
            if self._settings.bridge != "plain" and last == "assistant":
                return Fault("invalid", "reset() wrote nothing after a prompt that ends with words of the assistant")
            return reply
        shown = self._images_of(written)
        if len(shown) > self._settings.max_images:
            return Fault(
                "invalid",
                f"reset() returned {counted(len(shown), 'image')}, more than max_images {self._settings.max_images} of "
                f"the environment",
            )
        prompt = unexpanded = self._bridge.prompt(request.prompt.text, messages, written)
        images = request.prompt.images
        if images is not None:
            if images.images or shown:
                unexpanded = self._bridge.prompt(request.prompt.text, messages, written, expanded=False)
            images = replace(images, unexpanded_ids=tuple(unexpanded))
        longer = len(prompt) - len(request.prompt.token_ids)
        left = request.sampling.max_tokens - longer
        if left < 1:
            return Fault(
                "invalid",
                f"reset() returned messages that lengthen the prompt by {longer} tokens, but "
                f"max_response_tokens {request.sampling.max_tokens} must contain them and the turns",
            )
        limits = replace(self._limits(request), max_response_tokens=left)
        running.conversation = Conversation(TokenPrompt(prompt, images), limits, shown)
        running.messages += written
        return reply

    def _images_of(self, written: Sequence[Message]) -> list[EncodedImage]:
        """Return the images of an environment's messages.

        Raises:
            UsageError: they have some, but must not.
        """
        images = images_of(written)
        if images and not self._settings.max_images:
            raise UsageError("they have images, and max_images of the environment is 0: set it to their largest number")
        return images

    def _on_fault(self, running: RunningConversation, fault: Fault) -> None:
        """End a conversation whose environment failed; one without a turn gets one."""
        self._count_fault(running, fault)
        if running.turns:
            running.conversation.end("fault")
            running.rewards.append(0.0)
        self._continue(running)

    def _count_fault(self, running: RunningConversation, fault: Fault) -> None:
        """Store the failure of an environment.

        Raises:
            RunError: the settings allow no failure, or not as many.
        """
        self._faults.append((running.index, fault))
        allowed = self._settings.max_error_rate * self._count
        if self._settings.on_error == "raise" or len(self._faults) > allowed:
            self._raise(fault if self._settings.on_error == "raise" else self._faults[0][1])
        running.fault = fault

    def _raise(self, fault: Fault) -> None:
        name = self._settings.factory
        shown = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
        if self._settings.on_error == "raise":
            advice = ""
            if fault.kind != "invalid":  # every conversation would fail
                advice = (
                    "; to continue after a failure, set on_error of the environment to skip, which does not train on "
                    "the conversation, zero, which sets its reward to 0, or end, which keeps the rewards of the turns "
                    "before"
                )
            raise RunError(f"environment {shown} {fault.message}{advice}{_indented(fault.trace)}")
        raise RunError(
            f"environment {shown} failed in {len(self._faults)} of {self._count} conversations, more than its "
            f"max_error_rate of {self._settings.max_error_rate:g} allows; first failure: it "
            f"{fault.message}{_indented(fault.trace)}"
        )

    def _continue(self, running: RunningConversation) -> None:
        """Request the next turn, or end the conversation."""
        if running.conversation.stop is None:
            self._ready.append(running)
        else:
            self._end(running, running.turns[-1])

    def _end(self, running: RunningConversation, last: Turn) -> None:
        """Pass the last turn of a conversation that a limit has ended to ``finish`` of its environment."""
        stop = str(running.conversation.stop)
        if stop == "done" or running.fault is not None or not self._settings.may_finish:
            self._finish(running)
            return
        self._call_host(running, self._on_final_reply, stop=stop, last=last)

    def _on_final_reply(self, running: RunningConversation, reply: Reply | Fault) -> None:
        """Add the reward of ``finish`` to that of the last turn; the reason of the end remains, also at a failure."""
        self._calls -= 1
        running.environment_s += time.perf_counter() - running.called_at
        if isinstance(reply, Fault):
            self._count_fault(running, reply)
        else:
            running.rewards[-1] += reply.reward
            _add_metrics(running, reply)
        self._finish(running)

    def _finish(self, running: RunningConversation) -> None:
        """Store the completion of a conversation that has ended, and close its environment."""
        self._release(running)
        rewards = self._turn_rewards(running)
        if running.fault is not None and self._settings.on_error in ("zero", "skip"):
            rewards = [0.0] * len(rewards)
        record = ConversationRecord(
            prompt_ids=running.conversation.prompt,
            messages=running.messages,
            turn_ends=running.conversation.turn_ends,
            turn_rewards=rewards,
            stop=str(running.conversation.stop),
            tool_calls=sum(len(turn.calls) for turn in running.turns),
            malformed=running.malformed,
            fault=None if running.fault is None else running.fault.kind,
            metrics=running.metrics,
            environment_s=running.environment_s,
            text_starts=running.text_starts,
            images=running.conversation.written_images,
            images_in_prompt=running.conversation.images_in_prompt,
        )
        completion = replace(running.conversation.completion, conversation=record)
        self._completions[running.index] = completion
        if self._on_finished is not None:
            self._on_finished(running.index, completion)

    def _turn_rewards(self, running: RunningConversation) -> list[float]:
        """Return the reward of each turn."""
        first, *later = running.rewards
        return [first + later[0], *later[1:]]


def _add_metrics(running: RunningConversation, reply: Reply) -> None:
    for name, value in reply.metrics.items():
        running.metrics[name] = running.metrics.get(name, 0.0) + value


def _as_messages(messages: str | Sequence[Message], role: str) -> list[Message]:
    if isinstance(messages, str):
        if messages:
            return [{"role": role, "content": messages}]
        return []
    return list(messages)


def _indented(trace: str) -> str:
    return f"\n{trace}" if trace else ""
