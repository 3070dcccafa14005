"""Requests and responses of OpenAI's chat completions, as messages and turns of a conversation."""

from __future__ import annotations

import json
from typing import Any

from lightning_rlhf.environments.conversation import Conversation
from lightning_rlhf.environments.protocol import ROLES, Message, Turn
from lightning_rlhf.extras.agents.endpoint import Body, RefusedRequest
from lightning_rlhf.types import Completion


def messages_of(body: Body) -> list[Message]:
    """Return the messages of a request, in one form.

    Raises:
        RefusedRequest: they are not texts, or the request has an option that is not supported.
    """
    for option, default in (("n", 1), ("stop", None), ("response_format", None), ("logit_bias", None)):
        if body.get(option) not in (None, default, [], {}):
            raise RefusedRequest(f"{option} is not supported: the policy is sampled as the run is configured")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RefusedRequest("messages must be a list of at least one message")
    return [normalised(message) for message in messages]


def tools_of(body: Body) -> list[Body]:
    """Return the JSON schemas of the tools in a request.

    Raises:
        RefusedRequest: they are not a list of objects.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedRequest("tools must be a list of JSON schemas")
    return tools


def limit_of(body: Body) -> int | None:
    """Return the limit of tokens in a request; None without one."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    return None


def normalised(message: Message) -> Message:
    """Return role, text, tool calls and identifiers of a message of OpenAI's API."""
    role, content = message.get("role"), message.get("content")
    role = {"developer": "system", "function": "tool"}.get(str(role), role)
    if role not in (*ROLES, "assistant"):
        raise RefusedRequest(f"a message has the role {role!r}")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise RefusedRequest("messages may contain texts only")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str | None):
        raise RefusedRequest("the content of a message must be a text")
    further = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RefusedRequest("tool_calls must be a list")
    calls = [_call_of(call) for call in calls]
    return {"role": role, "content": content or "", **further, **({"tool_calls": calls} if calls else {})}


def _call_of(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates read them."""
    try:
        function, identity = call["function"], call.get("id", "")
        name, arguments = function["name"], function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RefusedRequest("a tool call needs a function with name and arguments") from error
    return {"type": "function", "id": str(identity), "function": {"name": str(name), "arguments": arguments}}


def response_of(turn: Turn, completion: Completion, conversation: Conversation) -> Body:
    """Return a turn as a response of OpenAI's API."""
    number = f"{len(conversation.turn_ends)}-{len(conversation.request)}"
    calls = [
        {
            "id": call.id or f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(turn.calls)
    ]
    if completion.finish_reason == "length":
        reason = "length"
    elif calls:
        reason = "tool_calls"
    else:
        reason = "stop"
    tokens = len(completion.token_ids)
    prompt = len(conversation.request) - tokens
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": turn.text,
                    **({"tool_calls": calls} if calls else {}),
                },
                "finish_reason": reason,
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
    }
