"""Reward functions of every kind, whose values depend only on their arguments."""

import asyncio
import time


def of_all(completions):
    """Compare the completions of a rollout, which needs all of them at once."""
    return [float(sorted(completions).index(text)) for text in completions]


def one_by_one(solution_str, ground_truth):
    return {"score": float(len(solution_str)), "right": solution_str == ground_truth}


def timed(completions, prompts):
    (text,) = completions
    return [None if text == "" else len(text) + 10.0 * len(prompts[0])]


def several(completions, finished):
    time.sleep(0.001 * len(completions[0]))
    return [float(finished[0])]


several.per_sample = True


async def awaited(completions, ground_truth):
    assert len(completions) == 1
    await asyncio.sleep(0.002 * (5 - len(completions[0])))
    return [float(completions[0] > ground_truth[0])]


awaited.per_sample = True


def a_tenth_of_a_second(solution_str):
    time.sleep(0.1)
    return 1.0


def slow(solution_str):
    time.sleep(0.4)
    return 1.0
