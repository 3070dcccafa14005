"""Settings of responses of the data in place of sampled ones, as demonstrations or for distillation."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rlhf.expected_errors import UsageError


@dataclass(frozen=True)
class GivenResponses:
    """Chooses the prompts of a step that take their response from the data instead of sampling.

    Use it for distillation from stored answers, or to add demonstrations. A prompt with a given response gets only that
    one, for any group size, and the end token is appended if it is missing. Given responses get no reward, and metrics
    of rewards and of the engine leave them out. In the files of ``RolloutLog`` their ``stop`` is ``given``. The rewards
    of the sampled responses are awaited before the evaluation. A step then contains fewer responses than ``batch_size``
    times ``group_size``, in mini-batches of about equal size.

    Args:
        column: column of the data with the response, a text.
        on_policy: fraction of the prompts whose responses are sampled, in [0, 1], drawn again in each epoch. You can
            also give a fraction for each source of prompts. Prompts of sources that you leave out are sampled.

    Raises:
        ValueError: a fraction is out of range.
    """

    column: str = "completion"
    on_policy: float | dict[str, float] = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.on_policy, dict):
            for source, fraction in self.on_policy.items():
                _check_fraction(f"on_policy of the source {source!r}", fraction)
        else:
            _check_fraction("on_policy", self.on_policy)

    def sampled_fraction(self, source: str | None) -> float:
        """Return the fraction of the prompts of a source whose responses are sampled."""
        if not isinstance(self.on_policy, dict):
            return self.on_policy
        return 1.0 if source is None else self.on_policy.get(source, 1.0)


def _check_fraction(name: str, fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise UsageError(f"{name} of given_responses must be in [0, 1], got {fraction}")
