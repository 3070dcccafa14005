"""Environments of the tests, which also run in worker processes."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image, ImageDraw

from lightning_rlhf.environments.protocol import Environment, Reply, ToolError


class Guess(Environment):
    """A number from a to h: each wrong guess is answered by ``<`` or ``>``."""

    def reset(self, seed):
        self.number = seed % 8

    def step(self, text):
        guess = ord(text[0]) - ord("a") if text else -1
        if guess == self.number:
            return Reply(reward=1.0, done=True, metrics={"found": 1.0})
        return Reply("b" if guess < self.number else "c", reward=-0.125, metrics={"found": 0.0})


class CountsLetters(Environment):
    """Answers with the first letters of a turn, rewards each a, and ends at a g."""

    def step(self, text):
        return Reply(text[:2] or "b", reward=float(text.count("a")), done="g" in text)


class Echo(Environment):
    """Repeats the first letters of each turn."""

    def step(self, text):
        return text[:2]


class Remembers(Environment):
    """Replies with a letter of the first turn; the reward of each turn depends on seed, row and all turns."""

    def reset(self, row, seed):
        self.value = (seed + len(row["prompt"])) % 97
        self.first = None

    def step(self, turn):
        self.first = turn.text[:1] if self.first is None else self.first
        self.value = (31 * self.value + sum(map(ord, turn.text))) % 97
        return Reply(self.first or "0", reward=self.value / 97)


class SlowEcho(Echo):
    """Does the same with an ``async`` step."""

    async def step(self, text):
        await asyncio.sleep(0.001)
        return text[:2]


class Greets(Echo):
    """Appends letters of the row to the prompt."""

    def reset(self, row):
        return row["greeting"]


class Empty(Environment):
    """Returns an empty reply."""

    def reset(self, row):
        self.kind = row["reply"]

    def step(self, text):
        return {"": "", "reply": Reply(), "list": Reply([])}[self.kind]


class SeveralMessages(Environment):
    """Replies with as many messages as its row names; each turn has a reward."""

    def reset(self, row):
        self.count = row["count"]

    def step(self, text):
        return Reply([{"role": "user", "content": "h"}] * self.count, reward=1.0)


class Misbehaves(Environment):
    """Misbehaves at its second turn as given in its row; other rows echo."""

    def __init__(self, log=None):
        self.log = log
        self.turns = 0

    def reset(self, row):
        self.fault = row["fault"]
        if self.fault == "reset":
            raise KeyError("at the start")

    def step(self, turn):
        self.turns += 1
        if turn.number == 1 and self.fault:
            return getattr(self, f"do_{self.fault}")()
        return turn.text[:2]

    def do_raise(self):
        raise ValueError("a broken world")

    def do_exit(self):
        sys.exit(3)

    def do_die(self):
        os._exit(0)

    def do_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_hang(self):
        time.sleep(3600)

    def do_spin(self):
        while True:
            pass

    def do_ignore(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)

    def do_nan(self):
        return Reply("a", reward=math.nan)

    def do_infinite(self):
        return Reply("a", reward=1e39)

    def do_text_reward(self):
        return Reply("a", reward="1")

    def do_bool_reward(self):
        return Reply("a", reward=True)

    def do_none(self):
        return None

    def do_number(self):
        return 3

    def do_tuple(self):
        return "a", 1.0, False

    def do_done_text(self):
        return Reply("a", done="yes")

    def do_bytes(self):
        return Reply(b"a")

    def do_assistant(self):
        return Reply([{"role": "assistant", "content": "a"}])

    def do_no_content(self):
        return Reply([{"role": "user"}])

    def do_content_list(self):
        return Reply([{"role": "user", "content": ["a", 7]}])

    def do_bad_metric(self):
        return Reply("a", metrics={"x": math.inf})

    def do_metric_key(self):
        return Reply("a", metrics={1: 1.0})

    def do_metric_list(self):
        return Reply("a", metrics=[1.0])

    def do_tool_error(self):
        raise ToolError("only tools raise this")

    def do_base(self):
        raise BaseException("not an Exception")

    def do_recursion(self):
        return self.do_recursion()

    def do_memory(self):
        raise MemoryError

    def do_generator(self):
        yield "a"

    def do_lambda(self):
        return Reply(lambda: "a")

    def do_closed_stdout(self):
        sys.stdout.close()
        os.close(1)
        raise OSError("nothing to write to")

    def do_stop_iteration(self):
        raise StopIteration

    def do_reward_none(self):
        return Reply("a", reward=None)

    def do_complex_reward(self):
        return Reply("a", reward=1j)

    def do_messages_none(self):
        return Reply(None)

    def do_messages_mapping(self):
        return Reply({"role": "user", "content": "a"})

    def do_role_missing(self):
        return Reply([{"content": "a"}])

    def do_done_number(self):
        return Reply("a", done=1)

    def do_unpicklable(self):
        raise ValueError(lambda: "cannot be sent to another process")

    def do_segfault(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def do_abort(self):
        os.abort()


FAULTS = {
    "reset": "error",
    **{name[3:]: "error" for name in vars(Misbehaves) if name.startswith("do_")},
    **dict.fromkeys(("die", "kill", "segfault", "abort"), "died"),
    **dict.fromkeys(("hang", "spin", "ignore"), "timeout"),
    **dict.fromkeys(
        (
            "nan", "infinite", "text_reward", "bool_reward", "none", "number", "tuple", "done_text", "bytes",
            "reward_none", "complex_reward", "messages_none", "messages_mapping", "role_missing", "done_number",
            "assistant", "no_content", "content_list", "bad_metric", "metric_key", "metric_list", "generator", "lambda",
        ),
        "invalid",
    ),
}  # fmt: skip


class Harmless(Environment):
    """Behaves at its second turn in unusual but valid ways."""

    def reset(self, row):
        self.act = row["act"]

    def step(self, turn):
        if turn.number == 1:
            getattr(self, f"do_{self.act}")()
        return "x" * 10_000_000 if self.act == "gigabyte" and turn.number == 1 else turn.text[:2]

    def do_gigabyte(self):
        """Return a reply of ten million letters."""

    def do_print(self):
        for _ in range(100_000):
            print("x" * 100)

    def do_fork(self):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)

    def do_chdir(self):
        os.chdir("/")

    def do_seed(self):
        import random

        random.seed(0)

    def do_environ(self):
        os.environ["HOME"] = "/nowhere"

    def do_close(self):
        self.close = self.fail

    def fail(self):
        raise ValueError("close")


class Unsteady(Environment):
    """Replies with the id of its process, so that it cannot be repeated in another one."""

    def step(self, turn):
        if turn.number == 1:
            os._exit(1)
        return str(os.getpid())


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def lookup(key: str) -> str:
    """Look up a key.

    Args:
        key: the key
    """
    if key != "k":
        raise ToolError(f"no entry {key!r}")
    return "v"


def crash() -> str:
    """Raise an error."""
    raise RuntimeError("the tool is broken")


class Counts(Environment):
    """Has counted some letters a when a limit ends the conversation; counts the calls for the final reward.

    Args:
        fault: whether the last call fails.
    """

    def __init__(self, fault=False):
        self.fault, self.seen, self.requested = fault, 0, 0

    def reset(self, seed):
        self.seed = seed

    def step(self, text):
        self.seen += text.count("a")
        return Reply(text[:1], done=text == "g")

    def finish(self, stop, turn, text):
        if self.fault:
            raise ValueError(f"no end {stop}")
        assert turn.text == text
        self.requested += 1
        cut = 100 if stop == "truncated" else 0  # the turn that was cut counts alone
        return Reply(reward=self.seen + cut * text.count("a"), metrics={"asked": self.requested, stop: 1.0})


class CountsInLoop(Counts):
    """Does the same with an ``async`` method."""

    async def finish(self, stop, turn, text):
        return super().finish(stop, turn, text)

    async def step(self, text):
        return super().step(text)


class FinishesWith(Echo):
    """Returns the value of its row at the end."""

    def reset(self, row):
        self.value = row["value"]

    def finish(self):
        return self.value


def make_counts():
    return Counts()


class DiesOnce(Counts):
    """Ends its process at the end of another conversation, so that this one is repeated in a new process."""

    def finish(self, stop, turn, text):
        if self.seed == 1:
            os._exit(1)
        return super().finish(stop, turn, text)


class Bank:
    """Accounts of a row, between which the policy moves money.

    Args:
        row: row with the balances and the wanted ones.
        seed: seed of the conversation.
        fee: fee of a transfer.
    """

    def __init__(self, row, seed, fee=0):
        self.balances, self.wanted, self.seed, self.fee = dict(row["balances"]), row["wanted"], seed, fee
        self._log = row.get("log")

    def balance(self, account: str) -> int:
        """Return the balance of an account.

        Args:
            account: name of the account
        """
        if account not in self.balances:
            raise ToolError(f"no account {account!r}")
        return self.balances[account]

    def transfer(self, source: str, target: str, amount: int = 1) -> str:
        """Move money.

        Args:
            source: account that pays
            target: account that receives
            amount: amount of money
        """
        self.balances[source] -= amount + self.fee
        self.balances[target] += amount
        return "done"

    def reward(self):
        return self.balances == self.wanted

    def close(self):
        if self._log:
            with open(self._log, "a") as log:
                log.write("closed\n")

    def _audit(self):
        raise AssertionError


class Counter:
    """Adds ones until there are three; the reward is a tenth of the length of the last text."""

    def __init__(self):
        self.count = 0

    def add(self) -> int:
        """Add one."""
        self.count += 1
        return self.count

    @staticmethod
    def twice(x: int) -> int:
        """Return the double of a number.

        Args:
            x: number
        """
        return 2 * x

    def done(self):
        return self.count >= 3

    def reward(self, text):
        return len(text) / 10


def sleep(seconds: float) -> str:
    """Wait.

    Args:
        seconds: time
    """
    try:
        time.sleep(seconds)
    except Exception:
        return "woken"
    return "slept"


async def sleep_async(seconds: float) -> str:
    """Wait.

    Args:
        seconds: time
    """
    await asyncio.sleep(seconds)
    return "slept"


class Drawings(Environment):
    """Shows a picture at the start, and another one after every other turn."""

    def reset(self, row, seed):
        self.seed = seed
        return Reply([{"role": "user", "content": [self.picture(0), "look"]}])

    def step(self, turn):
        if turn.number % 2:
            return "and?"
        return Reply([{"role": "user", "content": ["then ", self.picture(turn.number + 1), "<image>"]}])

    def picture(self, number):
        picture = Image.new("RGB", (20 + 4 * number, 24), (self.seed % 256, 40 * number, 9))
        ImageDraw.Draw(picture).line((0, 0, 12, 2 + self.seed % 17), fill="white")
        return picture


class DrawsSome(Drawings):
    """Draws as :class:`Drawings`, in half of the conversations."""

    def reset(self, row, seed):
        first = super().reset(row, seed)
        return first if seed % 2 else None

    def step(self, turn):
        return super().step(turn) if self.seed % 2 else "and?"


class KilledOnce(Environment):
    """Its process is killed at the second turn of the first conversation that has one, as by the system."""

    def __init__(self, path):
        self.path = Path(path)

    def step(self, turn):
        if turn.number == 1 and not self.path.exists():
            self.path.write_text("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return f"reply {turn.number}"
