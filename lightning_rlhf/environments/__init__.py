"""Environments of multi-turn rollouts, and tools. Names are imported on first use, so that workers start fast."""

from typing import TYPE_CHECKING

from lightning_rlhf.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_rlhf.environments.parsing import ToolCallParser as ToolCallParser
    from lightning_rlhf.environments.protocol import Agent as Agent
    from lightning_rlhf.environments.protocol import Environment as Environment
    from lightning_rlhf.environments.protocol import Reply as Reply
    from lightning_rlhf.environments.protocol import ToolCall as ToolCall
    from lightning_rlhf.environments.protocol import ToolError as ToolError
    from lightning_rlhf.environments.protocol import Turn as Turn
    from lightning_rlhf.environments.settings import EnvironmentSettings as EnvironmentSettings
    from lightning_rlhf.extras.environments.parsers import FunctionToolCalls as FunctionToolCalls
    from lightning_rlhf.extras.environments.parsers import JSONToolCalls as JSONToolCalls
    from lightning_rlhf.extras.environments.parsers import MarkedToolCalls as MarkedToolCalls
    from lightning_rlhf.extras.environments.parsers import TokenizerToolCalls as TokenizerToolCalls
    from lightning_rlhf.extras.environments.tools import StatefulTools as StatefulTools
    from lightning_rlhf.extras.environments.tools import Tools as Tools
    from lightning_rlhf.extras.environments.vllm_parser import VLLMToolCalls as VLLMToolCalls

_HOME = {
    "Agent": "lightning_rlhf.environments.protocol",
    "Environment": "lightning_rlhf.environments.protocol",
    "EnvironmentSettings": "lightning_rlhf.environments.settings",
    "FunctionToolCalls": "lightning_rlhf.extras.environments.parsers",
    "JSONToolCalls": "lightning_rlhf.extras.environments.parsers",
    "MarkedToolCalls": "lightning_rlhf.extras.environments.parsers",
    "Reply": "lightning_rlhf.environments.protocol",
    "StatefulTools": "lightning_rlhf.extras.environments.tools",
    "TokenizerToolCalls": "lightning_rlhf.extras.environments.parsers",
    "ToolCall": "lightning_rlhf.environments.protocol",
    "ToolCallParser": "lightning_rlhf.environments.parsing",
    "ToolError": "lightning_rlhf.environments.protocol",
    "Tools": "lightning_rlhf.extras.environments.tools",
    "Turn": "lightning_rlhf.environments.protocol",
    "VLLMToolCalls": "lightning_rlhf.extras.environments.vllm_parser",
}
__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
