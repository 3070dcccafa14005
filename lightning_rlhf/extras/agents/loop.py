"""Conversations of agents, which ask for turns of the policy through an HTTP endpoint; :class:`Agents` runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from lightning_rlhf.environments.bridges import TemplateBridge
from lightning_rlhf.environments.conversation import Conversation, StopReason
from lightning_rlhf.environments.host import Fault
from lightning_rlhf.environments.protocol import ROLES, Message, Reply
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.agents.chat_completions import limit_of, messages_of, normalised, response_of, tools_of
from lightning_rlhf.extras.agents.endpoint import AgentEndpoint, Body, RefusedRequest
from lightning_rlhf.rollout.conversation_loop import ConversationLoop, ConversationRequest, RunningConversation
from lightning_rlhf.types import Completion, TokenPrompt


@dataclass(eq=False)
class _Branch:
    """Requests of which each continues the one before.

    Args:
        history: messages of the last answered request, with the answer.
        tools: tools that its prompt names.
        conversation: tokens.
    """

    history: list[Message]
    tools: Sequence[Body]
    conversation: Conversation


@dataclass
class _Request:
    """A request of an agent that has not been read yet.

    Args:
        body: body of the request.
        answer: future of the body of the response.
    """

    body: Body
    answer: Future[Body]


@dataclass
class _Pending:
    """A request of an agent whose turn is being generated.

    Args:
        messages: all of its messages.
        tools: its tools.
        max_tokens: its limit of the turn; None without one.
        answer: future of the body of the response.
    """

    messages: list[Message]
    tools: Sequence[Body]
    max_tokens: int | None
    answer: Future[Body]


@dataclass
class _Agent:
    """State of the agent of a conversation.

    Args:
        api_key: key of the conversation.
        branches: branches with at least one turn; the one that was continued last is the last.
        pending: the request whose turn is being generated; None while there is none.
        waiting: requests that arrived meanwhile.
        outcome: result of the agent; None while it runs.
        unanswered: futures of all requests without a response, also of those that the loop has not seen yet. The
            thread of the endpoint adds to them only while the conversation is not released.
        is_released: whether the conversation has ended, so that no request is passed to the loop any more.
        lock: held to add to ``unanswered`` and to set ``is_released``.
    """

    api_key: str = ""
    branches: list[_Branch] = field(default_factory=list)
    pending: _Pending | None = None
    waiting: list[_Request] = field(default_factory=list)
    outcome: Reply | Fault | None = None
    unanswered: set[Future[Body]] = field(default_factory=set)
    is_released: bool = False
    lock: Lock = field(default_factory=Lock)


class AgentLoop(ConversationLoop):
    """Runs the conversations of agents.

    Messages that continue those of an earlier request and its answer, with the same tools, continue its tokens. Other
    messages begin a branch, whose prompt contains all of them. The row of a conversation consists of its branches, the
    one that was continued last at the end; each is computed without the tokens of those before it. An agent that fails
    before its first turn still needs a row: the base class then requests a turn of the row's own prompt, to which no
    request of the agent belongs.

    The base class requests the next turn of each conversation in ``_ready``, and calls :meth:`_on_turn` with it. Its
    thread calls what is put into ``_events``, so only :meth:`_receive` runs in another thread, the endpoint's. The
    running calls of environments are counted in ``_calls``: an agent is one of them from its start to its end, except
    while it waits for a turn of the policy (:meth:`_pause_for_turn`, :meth:`_resume_after_turn`).

    Args:
        endpoint: endpoint that agents send their requests to.
        *parts: arguments of :class:`ConversationLoop`.
    """

    _bridge: TemplateBridge  # the settings of an environment reject another one for agents

    def __init__(self, endpoint: AgentEndpoint, *parts: Any) -> None:
        super().__init__(*parts)
        self._endpoint = endpoint
        self._agents: dict[int, _Agent] = {}

    def _start(self, running: RunningConversation) -> None:
        """Start an agent."""
        agent = self._agents[running.index] = _Agent()
        agent.api_key = self._endpoint.register(partial(self._receive, running))
        self._call_host(running, self._on_outcome, base_url=self._endpoint.url, api_key=agent.api_key)

    def _release(self, running: RunningConversation) -> None:
        """Reject further requests of a conversation, and those without a response."""
        super()._release(running)
        agent = self._agents.get(running.index)
        if agent is None:  # never started, because the start of an earlier agent failed
            return
        self._endpoint.remove(agent.api_key)
        with agent.lock:
            agent.is_released = True
            unanswered = list(agent.unanswered)
        for answer in unanswered:
            answer.set_exception(_ended())

    def _pause_for_turn(self, running: RunningConversation) -> None:
        """Request the next turn: until it is there, the agent waits, and is no running call of the base class."""
        running.environment_s += time.perf_counter() - running.called_at
        self._calls -= 1
        self._ready.append(running)

    def _resume_after_turn(self, running: RunningConversation) -> None:
        """Count the agent as a running call again: it has the turn that it asked for."""
        self._calls += 1
        running.called_at = time.perf_counter()

    # -- requests ---------------------------------------------------------------------------------------------

    def _receive(self, running: RunningConversation, body: Body) -> Future[Body]:
        """Pass a request to the loop; called in the thread of the endpoint."""
        answer: Future[Body] = Future()
        agent = self._agents[running.index]
        with agent.lock:
            if agent.is_released:  # while the body arrived: the loop may have ended, and would not see the request
                answer.set_exception(_ended())
                return answer
            agent.unanswered.add(answer)
        answer.add_done_callback(agent.unanswered.discard)
        self._events.put(partial(self._on_request, running, _Request(body, answer)))
        return answer

    def _on_request(self, running: RunningConversation, request: _Request) -> None:
        """Request the next turn, unless one is being generated."""
        body, answer = request.body, request.answer
        agent = self._agents[running.index]
        if answer.done():  # the conversation has ended since the request arrived
            return
        if agent.outcome is not None:
            answer.set_exception(_ended())
        elif agent.pending is not None:
            agent.waiting.append(request)
        else:
            try:
                messages, tools = messages_of(body), tools_of(body)
                self._extend(running, agent, messages, tools)
            except RefusedRequest as error:
                answer.set_exception(error)
                return
            except UsageError as error:  # the chat template rejects the messages
                answer.set_exception(RefusedRequest(str(error)))
                return
            agent.pending = _Pending(messages, tools, limit_of(body), answer)
            self._pause_for_turn(running)

    def _extend(
        self, running: RunningConversation, agent: _Agent, messages: list[Message], tools: Sequence[Body]
    ) -> None:
        """Append the new messages of an agent to the branch that they continue, or begin another one.

        Raises:
            RefusedRequest: no further turn is possible.
        """
        if len(running.turns) == self._settings.max_turns:
            # The agent runs on, and _settle ends it with "done"; a conversation keeps its first reason.
            running.conversation.end("max_turns")
            raise RefusedRequest(f"max_turns of the environment is {self._settings.max_turns}", "max_turns")
        branch = _continued([branch for branch in agent.branches if branch.tools == tools], messages)
        if branch is None:
            self._begin_branch(running, messages, tools)
        else:
            self._continue_branch(running, branch, messages)

    def _continue_branch(self, running: RunningConversation, branch: _Branch, messages: list[Message]) -> None:
        """Append the new messages of an agent to a branch.

        Raises:
            RefusedRequest: the branch has ended, or ends now because they cannot be appended.
        """
        # It is the active branch also if it refuses, because the row ends with its ``stop``.
        running.conversation = conversation = branch.conversation
        if conversation.stop is None:
            turn, before = conversation.last_turn
            # Sets ``stop`` where no turn can follow: no token would be left for it, or the last turn is malformed.
            conversation.add_written(self._bridge.between(turn, messages[len(branch.history) :], before))
        if conversation.stop is not None:
            raise _refusal(conversation.stop)

    def _begin_branch(self, running: RunningConversation, messages: list[Message], tools: Sequence[Body]) -> None:
        """Begin a branch whose prompt contains all messages.

        Raises:
            RefusedRequest: they are too long.
        """
        prompt = self._bridge.conversation(messages, tools)
        # A branch may be as long as the row's own prompt and response.
        left = len(running.request.prompt.token_ids) + running.request.sampling.max_tokens - len(prompt)
        if left < 1:
            raise _too_long(f"the messages have {len(prompt)} tokens")
        limits = replace(self._limits(running.request), max_response_tokens=left)
        running.conversation = Conversation(TokenPrompt(prompt), limits)

    def _turn_budget(self, running: RunningConversation) -> int:
        """Return the largest number of tokens of the next turn."""
        budget, pending = running.conversation.turn_budget, self._agents[running.index].pending
        return budget if pending is None or pending.max_tokens is None else min(budget, pending.max_tokens)

    def _on_turn(self, running: RunningConversation, completion: Completion) -> None:
        """Append a turn and answer the request."""
        agent = self._agents[running.index]
        pending = agent.pending
        if pending is None:  # the agent failed before its first turn
            super()._on_turn(running, completion)
            return
        self._check.check_one(completion)
        is_agents_limit = self._turn_budget(running) < running.conversation.turn_budget
        running.conversation.add_turn(completion, may_be_cut=is_agents_limit)
        turn = self._turn_of(running, completion)
        running.turns.append(turn)
        running.malformed += turn.malformed is not None
        body = response_of(turn, completion, running.conversation)
        running.messages = [*pending.messages, normalised(body["choices"][0]["message"])]
        others = [branch for branch in agent.branches if branch.conversation is not running.conversation]
        agent.branches = [*others, _Branch(running.messages, pending.tools, running.conversation)]
        agent.pending = None
        self._resume_after_turn(running)
        pending.answer.set_result(body)
        if agent.outcome is not None:
            self._settle(running, agent.outcome)
        while agent.waiting and agent.pending is None:
            self._on_request(running, agent.waiting.pop(0))

    # -- end --------------------------------------------------------------------------------------------------

    def _on_outcome(self, running: RunningConversation, outcome: Reply | Fault) -> None:
        """End the conversation of an agent that has returned; a turn that is being generated is awaited."""
        agent = self._agents[running.index]
        agent.outcome = outcome
        if agent.pending is None:
            self._settle(running, outcome)

    def _settle(self, running: RunningConversation, outcome: Reply | Fault) -> None:
        """End the running call of an agent, store its reward and finish its conversation."""
        running.environment_s += time.perf_counter() - running.called_at
        self._calls -= 1
        if isinstance(outcome, Reply) and not running.turns:
            outcome = Fault("invalid", "ended without a turn of the policy")
        if isinstance(outcome, Fault):
            self._on_fault(running, outcome)  # ends the conversation, after a turn if it has none
            return
        running.rewards[0] = outcome.reward
        further = len(self._agents[running.index].branches) - 1  # beside the first
        running.metrics = {"branches": float(further), **outcome.metrics}  # one of the agent's own has precedence
        running.conversation.end("done")
        self._finish(running)

    def _finish(self, running: RunningConversation) -> None:
        """Store the branches of a conversation as one row."""
        branches = [branch.conversation for branch in self._agents[running.index].branches]
        if branches:
            row = branches[0]
            # To the tokens of the one that was not continued for longest come those of the others, whose prompts are
            # text of the environment; append() returns where each begins.
            running.text_starts = [row.append(branch) for branch in branches[1:]]
            row.stop = running.conversation.stop  # of the branch that was active at the end
            running.conversation = row
        super()._finish(running)

    def _turn_rewards(self, running: RunningConversation) -> list[float]:
        """Return the reward of each turn: that of the agent, the only one here, belongs to the last one."""
        return [0.0] * (len(running.conversation.turn_ends) - 1) + [running.rewards[0]]


def _continued(branches: Sequence[_Branch], messages: list[Message]) -> _Branch | None:
    """Return the branch that messages continue; None if they begin another one.

    Of several it is the longest, and of equally long ones the one that was continued last.
    """
    matching = [branch for branch in branches if _continues(messages, branch.history)]
    return max(reversed(matching), key=lambda branch: len(branch.history), default=None)


def _continues(messages: list[Message], history: list[Message]) -> bool:
    """Return whether messages are those of a history and later ones, none of which is the assistant's."""
    known, new = messages[: len(history)], messages[len(history) :]
    return known == history and bool(new) and all(message["role"] in ROLES for message in new)


def _refusal(stop: StopReason) -> RefusedRequest:
    """Return the refusal of a request that continues a branch which has ended."""
    if stop == "malformed":
        return RefusedRequest("the last turn is malformed, and cannot be continued")
    if stop == "truncated":
        return _too_long("the last turn was cut, and cannot be continued")
    return _too_long("no token is left for another turn")


def _ended() -> RefusedRequest:
    return RefusedRequest("the conversation has ended")


def _too_long(reason: str) -> RefusedRequest:
    return RefusedRequest(f"the conversation is too long: {reason}", "context_length_exceeded")


class Agents:
    """Runs the conversations of agents, and their endpoint, which starts with the first ones."""

    def __init__(self) -> None:
        self._endpoint: AgentEndpoint | None = None

    def run(self, requests: Sequence[ConversationRequest], *parts: Any) -> list[Completion]:
        """Generate conversations.

        Args:
            requests: at least one request.
            *parts: arguments of :class:`ConversationLoop`.
        """
        if self._endpoint is None:
            self._endpoint = AgentEndpoint()
        return AgentLoop(self._endpoint, *parts).run(requests)

    def close(self) -> None:
        """End the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = None
