"""Environments that were written for TRL or for SkyRL."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning_rlhf.calls.references import arguments_of, as_function
from lightning_rlhf.environments.protocol import Environment, Reply, Turn
from lightning_rlhf.extras.environments.tools import Tools

_NO_TOOLS = ("reset", "get_reward", "close")


class TRLEnvironment(Environment):
    """Runs a class for ``environment_factory`` of TRL's GRPOTrainer: ``reset(**row)``, and public methods as tools.

    If your class defines ``get_reward()``, it is called after every turn. The reward of a turn is its increase.

    Args:
        environment: class, or its reference ``file.py:name`` or ``module:name``.
        arguments: arguments of the class.
    """

    def __init__(self, environment: str | Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> None:
        factory = as_function(environment)
        self._environment = factory(**(arguments or {}))
        methods = inspect.getmembers(self._environment, inspect.ismethod)
        tools = [method for name, method in methods if not name.startswith("_") and name not in _NO_TOOLS]
        self._tools = Tools(tools)
        self._reward = 0.0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the methods, for the chat template."""
        return self._tools.schemas

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Start an episode with the columns of the row."""
        message = self._environment.reset(**arguments_of(self._environment.reset, row))
        if message is None:
            return None
        return str(message)

    def step(self, turn: Turn) -> Reply:
        """Run the calls of a turn."""
        reply = self._tools.step(turn)
        before, self._reward = self._reward, self._current_reward()
        return Reply(reply.messages, self._reward - before, reply.done, reply.metrics)

    def _current_reward(self) -> float:
        get_reward = getattr(self._environment, "get_reward", None)
        if get_reward is None:
            return 0.0
        return float(get_reward())


class SkyRLEnvironment(Environment):
    """Runs an environment with the interface of ``skyrl_gym.envs.BaseTextEnv``: ``init(prompt)`` and ``step(action)``.

    If ``init`` changes the prompt, the change is not used, except for messages that it appends.

    Args:
        environment: class, or its reference ``file.py:name`` or ``module:name``.
        arguments: arguments of the class.
        extras: column of the data to pass to the class as ``extras``. None passes the whole row.
        config: value to pass to the class as ``env_config``.
    """

    def __init__(
        self,
        environment: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        extras: str | None = None,
        config: Any = None,
    ) -> None:
        self._factory = as_function(environment)
        self._arguments = dict(arguments or {})
        self._extras = extras
        self._config = config
        self._environment: Any = None

    def reset(self, row: Mapping[str, Any]) -> Reply:
        """Make the environment for the row, and start it."""
        extras = dict(row) if self._extras is None else row[self._extras]
        self._environment = self._factory(env_config=self._config, extras=extras, **self._arguments)
        prompt = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        messages, _ = self._environment.init(prompt)
        return Reply(list(messages[len(prompt) :]))

    def step(self, text: str) -> Reply:
        """Take a step."""
        result = self._environment.step(text)
        metrics = {
            name: float(value)
            for name, value in (result.get("metadata") or {}).items()
            if isinstance(value, int | float)
        }
        return Reply(list(result.get("observations") or []), float(result["reward"]), bool(result["done"]), metrics)

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()
