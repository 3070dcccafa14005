"""Replies of environments: conversion and validation of values."""

import numpy as np
import pytest

from lightning_rlhf.environments.protocol import InvalidReplyError, Reply, as_reply


@pytest.mark.parametrize("done", [True, False, np.True_, np.False_])
def test_done_may_be_a_numpy_bool(done):
    reply = as_reply(Reply("a", done=done), "step")
    assert reply.done is bool(done)


def test_numpy_number_is_not_a_valid_done():
    with pytest.raises(ValueError, match=r"step\(\) returned done=.*1.*, expected True or False"):
        as_reply(Reply("a", done=np.int64(1)), "step")


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), 1e39])
def test_reward_must_be_a_finite_float32(value):
    with pytest.raises(InvalidReplyError, match=r"step\(\) returned the reward .*, expected a finite number"):
        as_reply(Reply("a", reward=value), "step")
    with pytest.raises(InvalidReplyError, match=r"finish\(\) returned the reward .*, expected a finite number"):
        as_reply(value, "finish")


@pytest.mark.parametrize("value", [10**400, float("nan"), float("-inf"), "1"])
def test_metric_must_be_a_finite_number(value):
    with pytest.raises(InvalidReplyError, match=r"step\(\) returned the metric 'moves': .*, expected finite numbers"):
        as_reply(Reply("a", metrics={"moves": value}), "step")


def test_numpy_numbers_are_converted():
    reply = as_reply(Reply("a", reward=np.float32(0.5), metrics={"moves": np.int64(3)}), "step")
    assert (reply.reward, reply.metrics) == (0.5, {"moves": 3.0})
    assert type(reply.reward) is type(reply.metrics["moves"]) is float
