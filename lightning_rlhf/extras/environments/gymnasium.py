"""Environments with the interface of gymnasium, which gem has, too: ``reset(seed=...)`` and ``step(action)``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from lightning_rlhf.calls.references import as_function, load_function
from lightning_rlhf.environments.protocol import Environment, Message, Reply
from lightning_rlhf.expected_errors import MissingPackageError, UsageError

_SEEDS = 2**31  # gymnasium's environments have seeds below 2**32, and some of numpy's below 2**31


class Gymnasium(Environment):
    """Plays an environment of gymnasium, gem, or another library with their interface.

    Your policy reads observations as texts, and its turns are the actions.

    Args:
        id: name of the environment, such as ``FrozenLake-v1``.
        make: function that makes it, ``gymnasium:make`` or ``gem:make``.
        arguments: further arguments of that function.
        action: function of a turn's text that returns the action, or its reference. It may raise ValueError for a text
            that is not an action. None passes integers on to discrete action spaces, and texts to others.
        invalid: message for a text that is not an action. None ends the episode.
        observation: function of an observation, or its reference, that returns a text, an image of Pillow, or a list of
            these. For example, ``PIL.Image:fromarray`` for observations that are frames.
    """

    def __init__(
        self,
        id: str,
        make: str = "gymnasium:make",
        arguments: Mapping[str, Any] | None = None,
        action: str | Callable[[str], Any] | None = None,
        invalid: str | None = "invalid action",
        observation: str | Callable[[Any], Any] = str,
    ) -> None:
        if make.startswith("gymnasium:") and importlib.util.find_spec("gymnasium") is None:
            raise MissingPackageError("Gymnasium needs gymnasium: run pip install 'lightning-rlhf[gymnasium]'")
        self._environment: Any = load_function(make)(id, **(arguments or {}))
        self._actions = getattr(self._environment, "action_space", None)
        if action is not None:
            self._action = as_function(action)
        elif hasattr(self._actions, "n"):
            self._action = int
        else:
            self._action = str
        self._observation = as_function(observation)
        self._invalid = invalid

    def reset(self, seed: int) -> Reply:
        """Start an episode; its first observation is appended to the prompt."""
        observation, info = self._environment.reset(seed=seed % _SEEDS)
        return Reply(self._messages(observation, info))

    def step(self, text: str) -> Reply:
        """Take a step."""
        try:
            action = self._action(text.strip())
        except ValueError:
            action = None
        contains = getattr(self._actions, "contains", None)
        if action is None or (contains is not None and not contains(action)):
            return Reply(self._invalid or "", done=self._invalid is None, metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return Reply(self._messages(observation, info), float(reward), bool(terminated or truncated))

    def _messages(self, observation: Any, info: Mapping[str, Any]) -> str | list[Message]:
        """Return an observation as text or as parts, with the suffix of gem."""
        content, suffix = self._observation(observation), str((info or {}).get("suffix", ""))
        if isinstance(content, str):
            return content + suffix
        parts = [*content] if isinstance(content, list | tuple) else [content]
        return [{"role": "user", "content": [*parts, suffix] if suffix else parts}]

    def close(self) -> None:
        """Close the environment."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()


class TextArena(Environment):
    """Plays a game of textarena for one player. The last turn gets the reward of the game.

    Args:
        id: name of the game, such as ``GuessTheNumber-v0``.
        arguments: further arguments of ``textarena.make``.
    """

    def __init__(self, id: str, arguments: Mapping[str, Any] | None = None) -> None:
        try:
            import textarena
        except ModuleNotFoundError as error:
            raise UsageError("TextArena needs textarena: run pip install 'lightning-rlhf[textarena]'") from error
        self._game: Any = textarena.make(id, **(arguments or {}))
        self._ended = False

    def reset(self, seed: int) -> Reply:
        """Start a game; its first observation is appended to the prompt."""
        self._game.reset(num_players=1, seed=seed % _SEEDS)
        return Reply(self._observed())

    def step(self, text: str) -> Reply:
        """Make a move."""
        done, _ = self._game.step(text)
        if not done:
            return Reply(self._observed())
        rewards, _ = self._game.close()
        self._ended = True
        return Reply(reward=float(rewards[0]), done=True)

    def _observed(self) -> str:
        _, observation = self._game.get_observation()
        return str(observation)

    def close(self) -> None:
        """Close the game, if it has not ended."""
        if not self._ended:
            self._game.close()
