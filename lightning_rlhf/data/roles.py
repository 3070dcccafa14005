"""Names of the roles of messages, here and in other formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
CALL_ROLES = ("function_call", "tool_call")  # their content is a call, or a list of calls, as JSON
# Names of roles in other formats, in small letters: ShareGPT, Gemma, GLM, Llama 3, OpenAI's first API.
OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    **dict.fromkeys(CALL_ROLES, "assistant"),
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}


def role_of(name: str, roles: Mapping[str, str]) -> str:
    """Return the canonical name of a role; a name that is not known is unchanged.

    Args:
        name: name of the role in the data.
        roles: further names of roles, each with its role here.
    """
    small = name.lower()
    return roles.get(name) or (small if small in ROLES else OTHER_ROLES.get(small, name))


def is_known(name: Any, roles: Mapping[str, str]) -> bool:
    """Return whether a value is the name of a role, here, in another format, or among the further names."""
    return isinstance(name, str) and role_of(name, roles) in ROLES
