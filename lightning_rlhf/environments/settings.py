"""Settings of the environment of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.calls.references import as_function
from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.environments.bridges import Bridge, PlainBridge, TemplateBridge
from lightning_rlhf.environments.host import Spec
from lightning_rlhf.environments.parsing import ToolCallParser
from lightning_rlhf.environments.protocol import Environment
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_range

# Arguments that are passed to the methods of environments and of agents; a method has those that it uses.
_OF_ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "reset": ("row", "seed"),
    "step": ("text", "calls", "turn"),
    "finish": ("stop", "text", "turn"),
    "close": (),
}
_OF_AGENTS = {"run": ("base_url", "api_key", "row", "seed")}


@dataclass(frozen=True)
class EnvironmentSettings:
    """Sets the environment that replies to your policy, and the limits of a conversation (see docs/environments.md).

    A call fails if the environment raises an exception, returns a value that is not a reply, takes longer than
    ``timeout_s``, or if its process ends. ``on_error`` decides what happens then.

    Args:
        factory: class of the environment, or function that returns one, or its reference ``file.py:name`` or
            ``module:name``. Every conversation gets a new object.
        arguments: keyword arguments of the factory.
        parser: parser of tool calls. None passes turns on as text.
        bridge: how messages of the environment become tokens. ``template`` uses the chat template, ``plain`` only the
            text. ``renderers`` uses the package renderers, which looks at the turn itself, for example at whether it
            ends with a call. Gemma 4 with tools needs it, because its template writes the results of tools into the
            turn before.
        renderer: renderer of that package, such as ``qwen3``. None finds it by the model's name, if that is known.
        max_turns: most turns of the policy, at least 1.
        max_turn_tokens: most tokens of one turn. None is limited by ``max_response_tokens`` of the loop, which counts
            all turns and the messages between them.
        max_message_tokens: most tokens of one message of the environment. Longer ones are cut in the middle. None does
            not cut.
        max_images: most images in the environment's messages of one conversation, 0 for messages of text only. Each may
            be up to 16,777,216 pixels and 33,554,432 bytes, and its tokens count in ``max_response_tokens``. The chat
            template must render images in messages of the user, or of tools if the environment offers some. This is
            checked before the engine starts.
        weight: factor of the environment's rewards in the sum of all rewards. 0 only logs them.
        timeout_s: time limit of one call of the environment, seconds, positive. The environment runs in worker
            processes, which can be killed. One with ``async`` methods is cancelled instead. None: no limit, in threads
            of the trainer's process.
        concurrency: most calls at the same time, and most worker processes, at least 1.
        on_error: action at a failure. ``raise`` ends the run, ``skip`` does not train on the conversation, ``zero``
            sets its reward to 0, ``end`` keeps the rewards of the turns before.
        max_error_rate: largest fraction of the conversations of a rollout, in [0, 1], that may fail without ending the
            run.
    """

    factory: str | Callable[..., Any]  # str first: otherwise the configuration cannot be saved
    arguments: dict[str, Any] = field(default_factory=dict)
    parser: ToolCallParser | None = None
    bridge: Literal["template", "plain", "renderers"] = "template"
    renderer: str | None = None
    max_turns: int = 8
    max_turn_tokens: int | None = None
    max_message_tokens: int | None = None
    max_images: int = 0
    weight: float = 1.0
    timeout_s: float | None = 60.0
    concurrency: int = 8
    on_error: Literal["raise", "skip", "zero", "end"] = "raise"
    max_error_rate: float = 0.5

    def __post_init__(self) -> None:
        least = {"max_turns": self.max_turns, "concurrency": self.concurrency}
        least |= {"max_turn_tokens": self.max_turn_tokens or 1, "max_message_tokens": self.max_message_tokens or 1}
        for name, value in least.items():
            if value < 1:
                raise UsageError(f"{name} of the environment must be at least 1, got {value}")
        check_range("max_images of the environment", self.max_images, "at least 0")
        check_range("timeout_s of the environment", self.timeout_s, "positive or null")
        check_range("max_error_rate of the environment", self.max_error_rate, "in [0, 1]")
        if self.renderer is not None and self.bridge != "renderers":
            raise UsageError(f"renderer {self.renderer!r} needs bridge: renderers, got bridge: {self.bridge}")
        try:
            factory = as_function(self.factory)
            inspect.signature(factory).bind(**self.arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(f"environment {self.factory!r}: {error}") from error
        if isinstance(factory, type) and not self.is_agent and not callable(getattr(factory, "step", None)):
            raise UsageError(
                f"environment {self.factory!r} has neither step(), which replies to a turn, nor run() of an agent"
            )
        if isinstance(factory, type):
            for name, passed in (_OF_AGENTS if self.is_agent else _OF_ENVIRONMENTS).items():
                _check_method(factory, name, passed)
        if self.is_agent and self.bridge == "plain":
            raise UsageError(f"{self.factory!r} is an agent, which sends chat messages: set bridge: template")
        if self.is_agent and self.max_images:
            raise UsageError(f"{self.factory!r} is an agent, whose messages have no images: set max_images to 0")

    @property
    def is_agent(self) -> bool:
        """Whether the factory is the class of an agent."""
        factory = as_function(self.factory)
        return isinstance(factory, type) and hasattr(factory, "run") and not hasattr(factory, "step")

    @property
    def may_finish(self) -> bool:
        """Whether the environment may have a method ``finish``, which is not known of those that a function returns."""
        factory = as_function(self.factory)
        finish = getattr(factory, "finish", None)
        return not isinstance(factory, type) or finish not in (None, Environment.finish)

    @property
    def spec(self) -> Spec:
        """The environment as it is sent to worker processes."""
        function = self.factory
        if inspect.isclass(function) and "<locals>" not in function.__qualname__:
            return Spec(f"{function.__module__}:{function.__qualname__}", self.arguments)
        return Spec(function, self.arguments)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the environment has in an attribute ``schemas``; an empty list without it."""
        factory = as_function(self.factory)
        if not hasattr(factory, "schemas"):
            return []
        return list(factory(**self.arguments).schemas)

    def make_bridge(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Bridge:
        """Return the validated bridge for a tokenizer.

        Args:
            options: variables of the chat template.

        Raises:
            ValueError: the tokenizer or its chat template do not allow the bridge.
        """
        bridge: Bridge
        if self.bridge == "plain":
            bridge = PlainBridge(tokenizer, self.max_message_tokens)
        else:
            tools = self.schemas if self.arguments.get("role") != "user" else []
            arguments = (tokenizer, self.max_message_tokens, tools, options)
            is_template = self.bridge == "template"
            bridge = TemplateBridge(*arguments) if is_template else the_offered("renderers")(*arguments, self.renderer)
        bridge.check()
        return bridge

    def check_parser(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Validate that the parser suits a tokenizer and the tools of the environment.

        Raises:
            ValueError: it does not, or the environment has tools and no parser.
        """
        if self.parser is not None:
            self.parser.check(tokenizer, self.schemas)
        elif self.schemas and not self.is_agent:
            names = ", ".join(schema["function"]["name"] for schema in self.schemas)
            raise UsageError(
                f"the environment has the tools {names}, but without a parser no call is found: set parser, such as "
                f"lightning_rlhf.environments.JSONToolCalls"
            )


def _check_method(factory: type, name: str, passed: Sequence[str]) -> None:
    """Validate that a method of an environment needs only arguments that are passed to it.

    Raises:
        UsageError: it needs another one.
    """
    method = inspect.getattr_static(factory, name, None)
    if not inspect.isfunction(method):  # also a method that is made otherwise, which its first call checks
        return
    parameters = list(inspect.signature(method).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [parameter for parameter in required if parameter not in passed]:
        raise UsageError(
            f"{factory.__qualname__}.{name}() has the argument {unknown[0]!r}, but nothing passes it: it gets "
            f"{', '.join(passed) or 'no arguments'}"
        )
