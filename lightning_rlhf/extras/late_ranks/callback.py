"""LateRanks: names the rank that makes no progress while the others wait for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import distributed_c10d

from lightning_rlhf.ranges import check_range
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.failure import location_of

log = logging.getLogger(__name__)
_CHECKS = 10  # within the seconds after which a rank is named
# Parts of the paths of code that may take long. Waits for rewards and engines log lines of their own.
_SLOW_CODE = (
    "lightning_rlhf/processes/waiting.py", "lightning_rlhf/rewards/", "torch/_dynamo/", "torch/_inductor/", "triton/",
    "torch/utils/cpp_extension.py", "deepspeed/ops/op_builder/", "safetensors/", "transformers/modeling_utils.py",
    "lightning_rlhf/strategies/checkpoints/",
)  # fmt: skip


@dataclass
class _Report:
    """What a rank wrote last, and when that changed, by the clock of the rank that reads it.

    Args:
        collectives: number of collectives that the rank has begun, by the name of the process group.
        name: rank, host and process.
        location: line that its main thread runs.
        is_slow: whether that is code which is expected to take long.
        written_at: time of the last report, seconds.
        moved_at: time at which a number of collectives changed, seconds.
    """

    collectives: dict[str, int] = field(default_factory=dict)
    name: str = ""
    location: str = ""
    is_slow: bool = False
    count: int = -1
    written_at: float = 0.0
    moved_at: float = 0.0

    def read(self, text: bytes, now: float) -> None:
        """Take over the newest report of the rank."""
        news = json.loads(text)
        if news["count"] != self.count:
            self.written_at = now
        if news["collectives"] != self.collectives:
            self.moved_at = now
        self.__dict__.update(news)


def late_ranks(reports: Sequence[_Report], now: float, seconds: float) -> dict[int, str]:
    """Return the ranks for which the others have waited, with what each of them does; empty if some rank moves.

    Args:
        reports: last report of each rank.
        now: time, seconds.
        seconds: time without progress after which a rank is late.
    """
    if any(now - report.moved_at < seconds for report in reports):
        return {}
    furthest: dict[str, int] = {}
    for report in reports:
        for group, number in report.collectives.items():
            furthest[group] = max(furthest.get(group, 0), number)
    late = {}
    for rank, report in enumerate(reports):
        if now - report.written_at >= seconds:
            late[rank] = f"{report.name} does not answer: it is stopped, or its machine hangs"
        elif any(number < furthest[group] for group, number in report.collectives.items()) and not report.is_slow:
            late[rank] = f"{report.name} is in {report.location}"
    return late


class LateRanks(Callback):
    """Prints a line about each rank that all others are waiting for.

    It shows you which rank hangs. A rank is late if it has begun fewer collectives than the others and no rank begins
    one. Reward functions, compilation, loading and checkpoints may take any time.

    Args:
        after_seconds: time without progress after which a rank is named, positive.
    """

    def __init__(self, after_seconds: float = 300.0) -> None:
        check_range("after_seconds", after_seconds, "positive")
        self.after_seconds = after_seconds
        self._ended = threading.Event()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start to watch."""
        if stage == "fit" and ranks.world_size() > 1:
            self._ended.clear()
            try:
                store = distributed_c10d._get_default_store().clone()  # its own connection: the other may wait in C++
            except (RuntimeError, AttributeError) as error:  # a store that has no second connection
                log.info("No rank that hangs will be named: %s", " ".join(str(error).split()))
                return
            watched = threading.current_thread().ident or 0
            threading.Thread(target=self._watch, args=[store, watched], name="late ranks", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self._ended.set()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self, store: Any, watched: int) -> None:
        rank, world_size = ranks.rank(), ranks.world_size()
        name = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
        now = time.monotonic()
        reports = [_Report(name=f"rank {other}", written_at=now, moved_at=now) for other in range(world_size)]
        named: set[int] = set()
        count = 0
        with contextlib.suppress(RuntimeError):  # at the end of the run, when the store is closed
            while not self._ended.wait(self.after_seconds / _CHECKS):
                count += 1
                progress = _progress(sys._current_frames()[watched])
                with self._says_if_stopped(rank):
                    store.set(_key(rank), json.dumps({"name": name, "count": count, **progress}))
                    if rank < 2:  # the second rank looks after the first one
                        self._compare(store, reports, named, rank)

    @contextlib.contextmanager
    def _says_if_stopped(self, rank: int) -> Iterator[None]:
        """Print a line if the store does not answer, which the first rank has: requests to it have no time limit."""
        line = "rank 0 does not answer: it is stopped, or its machine hangs; the other ranks wait for it"
        timer = threading.Timer(self.after_seconds, log.warning, [line])
        timer.daemon = True
        if rank == 1:
            timer.start()
        yield
        timer.cancel()

    def _compare(self, store: Any, reports: list[_Report], named: set[int], rank: int) -> None:
        """Print a line about each rank that is late and was not named since it last moved."""
        now = time.monotonic()
        for other, report in enumerate(reports):
            if store.check([_key(other)]):
                report.read(store.get(_key(other)), now)
        late = late_ranks(reports, now, self.after_seconds)
        named.intersection_update(late)
        for other, text in late.items():
            if other not in named and (rank == 0) != (other == 0):
                named.add(other)
                waited = now - max(report.moved_at for report in reports)
                log.warning("The other ranks have waited %.0f s for one: %s", waited, text)


def _key(rank: int) -> str:
    return f"lightning_rlhf/late_ranks/{rank}"


def _progress(frame: FrameType) -> dict[str, Any]:
    """Return how far this rank is, and where its main thread is."""
    world = distributed_c10d._world
    groups = list(world.pg_map)
    files = [line.filename for line in traceback.extract_stack(frame)]
    return {
        "collectives": {world.pg_names[group]: group._get_sequence_number_for_group() for group in groups},
        "location": location_of(frame),
        "is_slow": any(part in file for part in _SLOW_CODE for file in files),
    }
