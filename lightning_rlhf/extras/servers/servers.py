"""The vLLM servers of a run: which of them can be used, and which one a request goes to."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Event, Lock, Thread

from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.extras.servers.balance import Balancer
from lightning_rlhf.extras.servers.client import VLLMServer
from lightning_rlhf.types import Completion

log = logging.getLogger(__name__)
_WINDOW_SECONDS = 3600.0  # in which failures are counted
_LOOK_SECONDS = 5.0  # between looks at a server that is used
_RETRY_SECONDS = 1.0  # between looks at one that is not
_ANSWER_SECONDS = 30.0  # longest wait for the answer of a server that is not used, or where a request failed
_LABEL = re.compile(r"\brun (\w+), version -?\d+$")
_TRIES = 3  # largest number of times that a request fails on servers that work otherwise


class OtherRun(RunError):
    """Error for a server to which another run has pushed weights while this one used it."""


class LacksWeights(EngineDied):
    """Error for a server that responds, but has other weights than those of the last push."""


@dataclass(frozen=True)
class Addresses:
    """Addresses of the servers of a run.

    Args:
        urls: one address, several, or the path of a file ``*.txt`` with one in each line, which may change during the
            run; environment variables in the path, such as ``$SLURM_JOB_ID``, are replaced.

    Raises:
        ValueError: an address is missing or invalid.
    """

    urls: str | Sequence[str]

    def __post_init__(self) -> None:
        if self.file is None:
            for url in self.read() or [""]:
                VLLMServer(url, None, 1)  # validates it

    @property
    def file(self) -> Path | None:
        """File of the addresses, if they are in one."""
        if isinstance(self.urls, str) and self.urls.endswith(".txt"):
            return Path(os.path.expandvars(self.urls)).expanduser()
        return None

    def read(self) -> list[str]:
        """Return the different addresses; none if their file does not exist."""
        urls: Iterable[str] = [self.urls] if isinstance(self.urls, str) else self.urls
        if self.file is not None:
            lines = self.file.read_text().splitlines() if self.file.is_file() else []
            urls = (line.strip() for line in lines if line.strip() and not line.startswith("#"))
        return list(dict.fromkeys(url.rstrip("/") for url in urls))

    def __str__(self) -> str:
        return ", ".join(self.read()) if self.file is None else f"those in {self.file}"


@dataclass(eq=False)
class Member:
    """One server of a run.

    Args:
        server: its client.
        is_used: whether it gets requests.
        uses: number of times that it was used after it was not, so that late errors of earlier requests do not count.
        failures: times of its failures within the last hour.
        cause: last failure.
        is_up: whether it responded to the last look.
        given_up: whether it is never used again.
        images: SHA-256 of the images that it has received.
        image_locks: locks of sets of images that are being sent.
        has_left: whether it is no longer one of the run's servers.
        look_now: set when its thread should look at it at once.
    """

    server: VLLMServer
    is_used: bool = False
    uses: int = 0
    failures: deque[float] = field(default_factory=deque)
    cause: EngineDied | None = None
    is_up: bool = False
    given_up: bool = False
    images: set[str] = field(default_factory=set)
    image_locks: dict[frozenset[str], Lock] = field(default_factory=dict)
    has_left: bool = False
    look_now: Event = field(default_factory=Event)

    def leave(self) -> None:
        """End its thread."""
        self.has_left = True
        self.look_now.set()


@dataclass(frozen=True)
class Limits:
    """Limits of waiting for servers and of their failures.

    Args:
        timeout: longest wait for a server if none can be used, seconds.
        silent_seconds: longest time in which a server that is used does not respond to a look, seconds.
        max_restarts: largest number of failures of a server within an hour after which it is used again.
    """

    timeout: float
    silent_seconds: float
    max_restarts: int


class Servers:
    """Servers between which the requests of one rank are distributed.

    A server that does not respond, or has other weights than those of the last push, is left out until it responds and
    has them. Its requests are sent to others. A thread for each server looks at it regularly.

    Args:
        addresses: addresses of the servers, which :meth:`refresh` reads again.
        connect: function that returns the client of an address.
        prepare: function that lets a server generate with the weights of the last push; None on ranks that do not push.
        limits: limits of waiting and of failures.
    """

    def __init__(
        self,
        addresses: Addresses,
        connect: Callable[[str], VLLMServer],
        prepare: Callable[[Member], None] | None,
        limits: Limits,
    ) -> None:
        self._addresses = addresses
        self._connect = connect
        self._prepare = prepare
        self._limits = limits
        self._balancer = Balancer[Member]()
        self._changed = Condition()
        self._members: dict[str, Member] = {}
        self._watched = set[Member]()
        self._rejected = set[str]()  # addresses that are invalid
        self._closed = False
        self._pushing = False
        self.longest_wait = limits.timeout  # for a server if none can be used, seconds
        self.label: str | None = None  # of the weights of the last push; None before the first one
        self.left_out = 0  # number of times that a server was left out
        self.refresh()

    @property
    def members(self) -> list[Member]:
        """Servers of the run, in their order."""
        return list(self._members.values())

    def refresh(self) -> list[Member]:
        """Read the addresses again. A server that is new is used when it has the weights of the last push.

        Returns:
            The servers that have left.

        Raises:
            ValueError: an address is invalid, and the run has no server yet; later a warning is logged.
        """
        left = []
        urls = self._addresses.read() or list(self._members)  # a file may be empty while it is replaced
        for url in [url for url in self._members if url not in urls]:
            log.info("The vLLM server at %s has left the run.", url)
            member = self._members.pop(url)
            member.leave()
            self._balancer.remove(member)
            left.append(member)
        for url in urls:
            if url in self._members or url in self._rejected:
                continue
            try:
                member = Member(self._connect(url))
            except UsageError as error:
                if self.label is None:
                    raise
                self._rejected.add(url)
                log.warning("An address in %s is ignored: %s", self._addresses.file, error)
                continue
            self._members[url] = member
            self._balancer.add(member)
            self._balancer.exclude(member)
        return left

    def use(self, member: Member) -> None:
        """Send requests to a server from now on."""
        with self._changed:
            if member.is_used or member.has_left:
                return
            if member.cause is not None:
                log.warning("The vLLM server at %s is used again.", member.server.url)
            member.is_used, member.cause = True, None
            member.uses += 1
            member.images.clear()
            self._balancer.include(member)
            self._changed.notify_all()

    def leave_out(self, member: Member, use: int, error: EngineDied) -> None:
        """Send no requests to a server until it responds and has the weights; those that it has raise errors.

        Args:
            member: the server.
            use: its number of uses when it got the request that failed.
            error: cause.
        """
        with self._changed:
            if not member.is_used or member.uses != use or self._closed:
                return
            member.is_used = False
            self._balancer.exclude(member)
            self.left_out += 1
        self._count_failure(member, error)
        member.server.abort()
        member.look_now.set()

    def _count_failure(self, member: Member, error: EngineDied) -> None:
        with self._changed:
            now = time.monotonic()
            member.cause = error
            member.failures.append(now)
            while now - member.failures[0] > _WINDOW_SECONDS:
                member.failures.popleft()
            count = len(member.failures)
            member.given_up = count > self._limits.max_restarts
            self._changed.notify_all()
        if member.given_up:
            log.warning("%s. This server has failed %d times in an hour, and is not used again.", error, count)
        else:
            log.warning("%s. This server is left out until it works, and its requests are sent again.", error)

    def start_push(self, label: str) -> None:
        """Begin a push; servers may have older weights until :meth:`end_push`.

        Args:
            label: label of the weights that servers must have from now on.
        """
        self._pushing = True
        self.label = label
        for member in self.members:  # they are looked at regularly from now on
            if member not in self._watched:
                self._watched.add(member)
                Thread(target=self._watch, args=(member,), name=f"watch {member.server.url}", daemon=True).start()

    def end_push(self) -> None:
        """End a push."""
        self._pushing = False
        self._balancer.forget_texts()

    def call(self, text: Sequence[int], send: Callable[[Member], Completion]) -> Completion:
        """Send a request to a server; after a failure, send it again to this one or another.

        Args:
            text: token ids of the request.
            send: function that sends it and waits for the response.

        Raises:
            EngineDied: no server can be used, or the request fails on servers that work otherwise.
            RuntimeError: no weights were pushed, or the last push has failed.
        """
        if self.label is None:
            raise RunError("the servers have no weights yet: call update_weights() first")
        if self._pushing:
            raise RunError(f"the push of the weights {self.label!r} to the vLLM servers has failed")
        failures = 0
        while True:
            member = self._choose(text)
            use, sent = member.uses, list(text)
            try:
                completion = send(member)
                sent += completion.token_ids
                return completion
            except EngineDied as error:
                if self._closed:
                    raise
                fault = self._fault(member, use, error)
                if fault is not None:
                    self.leave_out(member, use, fault)
                else:
                    failures += 1
                    if failures == _TRIES:
                        raise
            finally:
                self._balancer.release(member, sent)

    def wait_for_one(self) -> None:
        """Wait until a server can be used.

        Raises:
            EngineDied: none can be used in time.
        """
        self._balancer.release(self._choose(()))

    def _choose(self, text: Sequence[int]) -> Member:
        """Return the server for a request; wait until there is one."""
        with self._changed:
            deadline = time.monotonic() + self.longest_wait
            while self._closed or (member := self._balancer.choose(text)) is None:
                remaining = deadline - time.monotonic()
                if self._closed or remaining <= 0 or all(each.given_up for each in self.members):
                    causes = [str(each.cause) for each in self.members if each.cause is not None]
                    raise EngineDied("; ".join(causes) or "no vLLM server can be used")
                self._changed.wait(remaining)
            return member

    def _fault(self, member: Member, use: int, error: EngineDied) -> EngineDied | None:
        """Look at a server after the error of a request; return the fault of the server, None if it works."""
        if not member.is_used or member.uses != use:
            return error
        try:
            self._look(member, _ANSWER_SECONDS)
        except LacksWeights as fault:
            return fault
        except EngineDied:
            return error
        except OtherRun as fault:
            self._reject(member, fault)
            return error
        return None

    def has_weights(self, member: Member) -> bool:
        """Return whether a server that is not used has the weights of the last push.

        Raises:
            EngineDied: it does not respond.
        """
        try:
            self._look(member, _ANSWER_SECONDS)
        except LacksWeights:
            return False
        return True

    def _look(self, member: Member, seconds: float) -> None:
        """Check that a server responds and has the weights of the last push.

        Raises:
            LacksWeights: it has other weights.
            OtherRun: it has those of another run, and is used by this one.
            EngineDied: it does not respond.
        """
        label, is_used = self.label, member.is_used
        info = member.server.get("/weight_info", seconds=seconds)
        version = str(info.get("weight_version")) if isinstance(info, dict) else "None"
        if version == label:
            return
        if is_used and _run_of(version) not in (None, _run_of(str(label))):
            raise OtherRun(f"another run pushes weights to the vLLM server at {member.server.url} ({version!r})")
        raise LacksWeights(
            f"the vLLM server at {member.server.url} has the weights {version!r}, not those of {label!r}: it was "
            f"restarted"
        )

    def _watch(self, member: Member) -> None:
        while not (member.has_left or member.given_up):
            member.look_now.clear()
            try:
                self._update(member)
            except (RuntimeError, ValueError, LookupError, TypeError, OSError) as error:  # of its settings, for example
                self._reject(member, error)
            member.look_now.wait(_LOOK_SECONDS if member.is_used else _RETRY_SECONDS)

    def _update(self, member: Member) -> None:
        """Look at a server; use it, leave it out, or give it the weights accordingly."""
        is_used, use = member.is_used, member.uses
        before = self.label, self._pushing
        try:
            patient = is_used or self._pushing
            self._look(member, self._limits.silent_seconds if patient else _ANSWER_SECONDS)
            fault: EngineDied | OtherRun | None = None
        except (EngineDied, OtherRun) as error:
            fault = error
        member.is_up = fault is None or isinstance(fault, (LacksWeights, OtherRun))
        if not member.is_up and not is_used:
            member.server.abort()  # a push to it
        if member.is_up and ((self.label, self._pushing) != before or self._pushing):
            return  # a server may have the weights before or after a push
        if fault is None and (is_used or self._prepare is None):
            self.use(member)
        elif isinstance(fault, OtherRun):
            self._reject(member, fault)
        elif is_used and fault is not None:
            self.leave_out(member, use, fault)
        elif member.is_up and self._prepare is not None:
            try:
                with member.server.limited_to(self._limits.silent_seconds):
                    self._prepare(member)
            except EngineDied as error:
                member.is_up = False
                if not self._pushing:  # a push of newer weights aborts this one
                    self._count_failure(member, error)

    def _reject(self, member: Member, error: Exception) -> None:
        """Use a server never again."""
        if member.has_left:
            return
        log.warning("The vLLM server at %s is not used: %s", member.server.url, error)
        with self._changed:
            member.is_used, member.given_up = False, True
            member.cause = EngineDied(str(error))
            self._balancer.exclude(member)
            self._changed.notify_all()

    def close(self) -> None:
        """End requests without a response, and the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for member in self.members:
            member.leave()
            member.server.abort()


def label_of(run: str, version: int) -> str:
    """Return the label of the weights of a run and a version of its policy."""
    return f"run {run}, version {version}"


def _run_of(label: str) -> str | None:
    """Return the run in a label of :func:`label_of`; None for another label."""
    match = _LABEL.search(label)
    return match[1] if match else None
