"""A slow reward, so that a run can be killed in the middle of a step."""

import time

from lightning_rlhf.tasks import addition


def exact(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    time.sleep(0.5)
    return addition.exact(completions, answer, finished)
