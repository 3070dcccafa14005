"""Kept answers: equal questions at the same time, failed ones, and files of killed processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_rlhf.extras.judges.answers import Answers

ROOT = Path(__file__).resolve().parents[3]


class Asking:
    """Counts questions; each answer takes a moment."""

    def __init__(self, fails=()):
        self.asked, self.fails = [], list(fails)

    def of(self, key):
        async def ask():
            self.asked.append(key)
            await asyncio.sleep(0.02)
            if self.fails and self.fails.pop(0):
                raise RuntimeError("unreadable")
            return f"answer to {key}"

        return ask


def get(answers, asking, *keys):
    async def all_of_them():
        return await asyncio.gather(*(answers.get(key, asking.of(key)) for key in keys), return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("path", [None, "folder/answers.jsonl"])
def test_equal_questions_are_asked_once_also_at_the_same_time(tmp_path, path):
    answers, asking = Answers(path and str(tmp_path / path)), Asking()
    results = get(answers, asking, "a", "b", "a", "a")
    assert results == [("answer to a", False), ("answer to b", False), ("answer to a", True), ("answer to a", True)]
    assert get(answers, asking, "b") == [("answer to b", True)]
    assert asking.asked == ["a", "b"]


def test_event_loops_of_several_threads_ask_once():
    answers, asking = Answers(None), Asking()
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: get(answers, asking, "a")[0], range(8)))
    assert [text for text, _ in results] == ["answer to a"] * 8
    assert [is_kept for _, is_kept in results].count(False) == 1
    assert asking.asked == ["a"]


def test_error_reaches_all_who_wait_and_is_not_kept(tmp_path):
    answers, asking = Answers(str(tmp_path / "answers.jsonl")), Asking(fails=[True])
    assert [str(error) for error in get(answers, asking, "a", "a")] == ["unreadable"] * 2
    assert not (tmp_path / "answers.jsonl").exists()
    assert get(answers, asking, "a") == [("answer to a", False)]
    assert asking.asked == ["a", "a"]


def test_who_waits_asks_if_the_first_is_cancelled():
    answers, asking = Answers(None), Asking()

    async def cancel_first():
        first = asyncio.ensure_future(answers.get("a", asking.of("a")))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(answers.get("a", asking.of("a")))
        await asyncio.sleep(0)
        first.cancel()
        return await second, first.cancelled()

    assert asyncio.run(cancel_first()) == (("answer to a", False), True)
    assert asking.asked == ["a", "a"]


def test_who_waits_can_be_cancelled_without_the_first():
    answers, asking = Answers(None), Asking()

    async def cancel_second():
        first = asyncio.ensure_future(answers.get("a", asking.of("a")))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(answers.get("a", asking.of("a")))
        await asyncio.sleep(0)
        second.cancel()
        return await first, await asyncio.gather(second, return_exceptions=True)

    result, (cancelled,) = asyncio.run(cancel_second())
    assert result == ("answer to a", False)
    assert isinstance(cancelled, asyncio.CancelledError)


def test_damaged_lines_are_counted_and_their_questions_asked_again(tmp_path, caplog):
    path = tmp_path / "answers.jsonl"
    get(Answers(str(path)), Asking(), "a", "b", "\ud800\u2028")
    whole = path.read_bytes()
    path.write_bytes(b"[1]\n" + whole + b'{"key": "c", "ans')  # killed while it wrote
    answers, asking = Answers(str(path)), Asking()
    results = get(answers, asking, "a", "b", "\ud800\u2028", "c")
    assert [is_kept for _, is_kept in results] == [True, True, True, False]
    assert f"2 lines of {path} cannot be read" in caplog.text
    assert get(Answers(str(path)), Asking(), "c", "a") == [("answer to c", True), ("answer to a", True)]


def test_every_end_of_a_killed_process_leaves_a_file_that_continues(tmp_path):
    path = tmp_path / "answers.jsonl"
    get(Answers(str(path)), Asking(), "a", "b")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        asking = Asking()
        assert [text for text, _ in get(Answers(str(path)), asking, "a", "b")] == ["answer to a", "answer to b"]
        again = Asking()
        get(Answers(str(path)), again, "a", "b")
        assert again.asked == []


def test_answer_of_a_file_that_changed_is_not_another_question_s(tmp_path):
    path = tmp_path / "answers.jsonl"
    answers, asking = Answers(str(path)), Asking()
    get(answers, asking, "a", "b")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::-1]))
    assert get(answers, asking, "a", "b") == [("answer to a", False), ("answer to b", False)]


def test_folder_in_place_of_the_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"must be a file, got the directory .*: add a name, such as answers\.jsonl"):
        Answers(str(tmp_path))


@pytest.mark.slow
def test_processes_that_are_killed_lose_no_answer_and_mix_no_lines(tmp_path):
    path, program = tmp_path / "answers.jsonl", tmp_path / "program.py"
    program.write_text(
        "import asyncio, sys\n"
        "from lightning_rlhf.extras.judges.answers import Answers\n"
        "answers = Answers(sys.argv[1])\n"
        "async def main():\n"
        "    for number in range(10**9):\n"
        "        async def ask():\n"
        "            return f'{sys.argv[2]} {number} ' + 'x' * 20000\n"
        "        await answers.get(f'{sys.argv[2]} {number}', ask)\n"
        "        print(number, flush=True)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = [tmp_path / "0", tmp_path / "1"]
    processes = []
    for output in outputs:
        with output.open("w") as file:
            line = [sys.executable, str(program), str(path), output.name]
            processes.append(subprocess.Popen(line, stdout=file, env=environment))
    end = time.monotonic() + 100
    while min(len(output.read_text().splitlines()) for output in outputs) < 30 and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    answers, asking = Answers(str(path)), Asking()
    for output in outputs:
        finished = len(output.read_text().splitlines()) - 1  # the last line may be incomplete
        assert finished >= 29
        results = get(answers, asking, *(f"{output.name} {number}" for number in range(finished)))
        assert all(text.startswith(f"{output.name} {number} x") for number, (text, _) in enumerate(results))
    assert asking.asked == []
