"""Workers of environments and rewards are killed at random times: the run has the same bits as an undisturbed one."""

import pytest

from tests.faults.runs import CONVERSATIONS, assert_same, output, ppo
from tests.faults.test_engine_deaths import with_killer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("of", ["rewards", "environments"])
def test_killed_workers_change_no_result(forge, undisturbed, tmp_path, of):
    steps = {"max_steps": 80, "val_check_interval": 40, "check_val_every_n_epoch": None}
    config = ppo(60, environment={**CONVERSATIONS, "timeout_s": 60.0} if of == "environments" else None, **steps)
    if of == "rewards":
        slow = {"function": "tests.faults.runs.slow_digits", "name": "digits", "timeout_s": 60.0}
        config["trainer"]["callbacks"][0]["init_args"]["rewards"] = [slow]
    # A call is repeated once after its worker was killed, so only one worker is killed in a step.
    killing = with_killer(config, seed=1, deaths=20, every=1.0, word="multiprocessing.spawn", after_steps=1.0)
    assert forge.attempt(tmp_path, killing) == 0, output(tmp_path)[-4000:]
    assert int((tmp_path / "killed").read_text()) == 20
    assert_same(tmp_path, undisturbed(config))
