"""Futures are yielded in the order of their completion, with None at regular intervals in between."""

import threading
import time
from concurrent.futures import Future

from lightning_rlhf.rollout.vllm.requests import as_completed_with_heartbeat


def test_each_future_is_yielded_once_in_the_order_of_completion():
    futures = [Future() for _ in range(4)]
    futures[2].set_result("was there")

    def work():
        for number in (3, 0, 1):
            time.sleep(0.05)
            futures[number].set_exception(ValueError()) if number == 0 else futures[number].set_result(number)

    threading.Thread(target=work).start()
    assert list(as_completed_with_heartbeat(futures, 60)) == [futures[number] for number in (2, 3, 0, 1)]
    assert list(as_completed_with_heartbeat([], 60)) == []


def test_none_is_yielded_at_intervals_even_while_futures_complete():
    futures = [Future() for _ in range(8)]

    def work():
        for future in futures:
            time.sleep(0.1)
            future.set_result(None)

    threading.Thread(target=work).start()
    result = list(as_completed_with_heartbeat(futures, 0.25))
    assert [future for future in result if future is not None] == futures
    assert 2 <= result.count(None) <= 8
