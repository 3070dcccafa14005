"""Replies: values that are converted."""

import numpy as np
import pytest

from lightning_rlhf.environments.protocol import Reply, as_reply


@pytest.mark.parametrize("done", [True, False, np.True_, np.False_])
def test_an_end_may_be_a_bool_of_numpy(done):
    reply = as_reply(Reply("a", done=done), "step")
    assert reply.done is bool(done)


def test_a_number_of_numpy_is_no_end():
    with pytest.raises(ValueError, match=r"step\(\) returned done=.*1.*, expected True or False"):
        as_reply(Reply("a", done=np.int64(1)), "step")
