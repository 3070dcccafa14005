"""Comparison of an engine's answers with the request, whatever the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_rlhf.rollout.engine import Finished
from lightning_rlhf.types import Completion


@dataclass(frozen=True)
class AnswerCheck:
    """What the completions of one call of ``generate`` must have.

    Args:
        max_tokens: most tokens of a response.
        version: of the policy that was pushed last.
        vocabulary: V, number of tokens of the actor.
    """

    max_tokens: int
    version: int
    vocabulary: int

    def one(self, completion: Completion) -> None:
        """Validate one completion.

        Raises:
            RuntimeError: it is longer, of another policy, or has a token that the actor does not have.
        """
        ids = completion.token_ids
        if completion.policy_version != self.version:
            raise RuntimeError(
                f"the engine answered with policy version {completion.policy_version}, but {self.version} was pushed "
                f"last: its weights are not the actor's"
            )
        if len(ids) > self.max_tokens:
            raise RuntimeError(f"the engine returned {len(ids)} tokens where at most {self.max_tokens} were requested")
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
            raise RuntimeError(f"the engine returned token {wrong}; the actor has tokens 0 to {self.vocabulary - 1}")

    def all(self, completions: Sequence[Completion], prompts: int) -> None:
        """Validate the completions of all prompts.

        Args:
            completions: the engine's answers.
            prompts: number of requests.

        Raises:
            RuntimeError: one is missing or wrong.
        """
        if len(completions) != prompts:
            raise RuntimeError(f"the engine returned {len(completions)} completions for {prompts} prompts")
        for completion in completions:
            self.one(completion)

    def before(self, finished: Finished | None) -> Finished | None:
        """Return a callback that validates a completion, then calls another one.

        Args:
            finished: the other callback; None returns None.
        """
        if finished is None:
            return None

        def checked(number: int, completion: Completion) -> None:
            self.one(completion)
            finished(number, completion)

        return checked
