"""Environments of multi-turn rollouts, and tools. Names are imported on first use, so that workers start fast."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_rlhf.environments.parsers import FunctionToolCalls as FunctionToolCalls
    from lightning_rlhf.environments.parsers import JSONToolCalls as JSONToolCalls
    from lightning_rlhf.environments.parsers import MarkedToolCalls as MarkedToolCalls
    from lightning_rlhf.environments.parsers import TokenizerToolCalls as TokenizerToolCalls
    from lightning_rlhf.environments.parsers import ToolCallParser as ToolCallParser
    from lightning_rlhf.environments.protocol import Agent as Agent
    from lightning_rlhf.environments.protocol import Environment as Environment
    from lightning_rlhf.environments.protocol import Reply as Reply
    from lightning_rlhf.environments.protocol import ToolCall as ToolCall
    from lightning_rlhf.environments.protocol import ToolError as ToolError
    from lightning_rlhf.environments.protocol import Turn as Turn
    from lightning_rlhf.environments.settings import EnvironmentSettings as EnvironmentSettings
    from lightning_rlhf.environments.tools import StatefulTools as StatefulTools
    from lightning_rlhf.environments.tools import Tools as Tools
    from lightning_rlhf.environments.vllm_parser import VLLMToolCalls as VLLMToolCalls

_MODULES = {
    "Agent": "protocol",
    "Environment": "protocol",
    "EnvironmentSettings": "settings",
    "FunctionToolCalls": "parsers",
    "JSONToolCalls": "parsers",
    "MarkedToolCalls": "parsers",
    "Reply": "protocol",
    "StatefulTools": "tools",
    "TokenizerToolCalls": "parsers",
    "ToolCall": "protocol",
    "ToolCallParser": "parsers",
    "ToolError": "protocol",
    "Tools": "tools",
    "Turn": "protocol",
    "VLLMToolCalls": "vllm_parser",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
