"""Agents of the tests, which use OpenAI's client."""

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from http.client import HTTPConnection
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

from lightning_rlhf.environments.protocol import Agent, Reply


def client_of(base_url, api_key):
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=30.0)


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


class TwoTurns(Agent):
    """A plain loop of two turns, with the client's message objects in the history."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)
        messages = [user(row["prompt"])]
        answer = ask(client, messages)
        messages += [answer.choices[0].message, user("gh")]
        second = ask(client, messages)
        assert second.choices[0].finish_reason == "stop"
        assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
        return Reply(reward=len(second.choices[0].message.content) / 2, metrics={"asked": 2.0})


class AsyncTwoTurns(Agent):
    """A loop of two turns with the asynchronous client."""

    async def run(self, base_url, api_key, row):
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            messages = [user(row["prompt"])]
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message, user("gh")]
        return len(answer.choices[0].message.content) / 2


class Rewrites(Agent):
    """Shortens its history before the third turn."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)
        messages = [user("a")]
        for _ in range(2):
            messages += [ask(client, messages).choices[0].message, user("gh")]
        messages[1].content = "c"  # differs from the policy's turn
        messages += [ask(client, messages).choices[0].message, user("h")]
        ask(client, messages)
        return 1.0


class ChangesTools(Agent):
    """Continues its history with another tool, and then with the same one."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)
        first, second = ([{"type": "function", "function": {"name": name}}] for name in ("look", "write"))
        messages = [user("a")]
        for tools in (first, second, second):
            messages += [ask(client, messages, tools=tools).choices[0].message, user("h")]
        return 1.0


class Alternates(Agent):
    """Alternates between two agents, and continues the first once more."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)
        histories = [[user("a")], [user("g")]]
        for number in (0, 1, 0, 1, 0):
            histories[number] += [ask(client, histories[number]).choices[0].message, user("h")]
        return 1.0


class Streams(Agent):
    """Reads the answer as a stream."""

    def run(self, base_url, api_key, row):
        parts = [
            chunk.choices[0].delta.content for chunk in ask(client_of(base_url, api_key), [user("a")], stream=True)
        ]
        return float(len("".join(part or "" for part in parts)))


class CallsTools(Agent):
    """Calls tools until a turn has no calls."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)
        messages = [user("a")]
        for turn in range(2):
            message = ask(client, messages).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(turn)
            results = [(call.id, call.function.arguments) for call in message.tool_calls]
            assert results[0][1] == '{"x": "b"}'
            messages += [{"role": "tool", "tool_call_id": number, "content": "c"} for number, _ in results]
        return 9.0


class TooMany(Agent):
    """Sends requests until one is rejected; the reward is the number of answers."""

    def run(self, base_url, api_key, row):
        import openai

        client, messages = client_of(base_url, api_key), [user("a")]
        try:
            for _ in range(99):
                answer = ask(client, messages, max_tokens=row.get("max_tokens"))
                messages += [answer.choices[0].message, user("b")]
        except openai.BadRequestError as error:
            if error.code != row["code"]:
                raise
        return (len(messages) - 1) / 2


class RepeatsRefused(Agent):
    """Sends a request that is refused twice; the reward is 1 if it gets the same refusal."""

    def run(self, base_url, api_key, row):
        import openai

        client, messages, refusals = client_of(base_url, api_key), [user("a")], []
        messages += [ask(client, messages).choices[0].message, user("b")]
        for _ in range(2):
            try:
                ask(client, messages)
            except openai.BadRequestError as error:
                refusals.append(error.body)
        return float(refusals == [refusals[0]] * 2)


class LeavesABody(Agent):
    """Returns while a request is open, of which the endpoint has read the head; only for hosts of this process."""

    opened: ClassVar = []

    def run(self, base_url, api_key, row):
        ask(client_of(base_url, api_key), [user("a")])
        connection = HTTPConnection(base_url.removeprefix("http://").removesuffix("/v1"), timeout=10)
        connection.putrequest("POST", "/v1/chat/completions")
        for name, value in (("Authorization", f"Bearer {api_key}"), ("Content-Length", 2), ("Expect", "100-continue")):
            connection.putheader(name, value)
        connection.endheaders()
        connection.sock.recv(1, socket.MSG_PEEK)  # of "100 Continue": the endpoint waits for the body
        self.opened.append(connection)
        return 1.0


class IsRefused(Agent):
    """Stores the refusal of its first request; only for hosts of this process."""

    refusals: ClassVar = SimpleQueue()

    def run(self, base_url, api_key, row):
        import openai

        try:
            ask(client_of(base_url, api_key), [user("a")])
        except openai.BadRequestError as error:
            self.refusals.put(error.body["message"])
        return 0.0


class Parallel(Agent):
    """Sends two requests simultaneously."""

    def run(self, base_url, api_key, row):
        client, answers = client_of(base_url, api_key), []
        threads = [
            threading.Thread(target=lambda text=text: answers.append(ask(client, [user(text)]))) for text in "ab"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return float(len(answers))


class ManyAtOnce(Agent):
    """Sends five requests at once; the reward is the number of answers."""

    def run(self, base_url, api_key, row):
        import openai

        client, answers = client_of(base_url, api_key), []

        def one(text):
            with contextlib.suppress(openai.BadRequestError):
                answers.append(ask(client, [user(text)]))

        threads = [threading.Thread(target=one, args=(text,)) for text in "abcde"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return float(len(answers))


class LeavesRequests(Agent):
    """Returns while its first request is being answered and a second one waits."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)

        def one(text):
            with contextlib.suppress(Exception):
                ask(client, [user(text)])

        for text in "ab":
            threading.Thread(target=one, args=(text,), daemon=True).start()
        threading.Event().wait(1.0)
        return 1.0


WRONG = [
    {"messages": "a"}, {"messages": []}, {"messages": [1]}, {"messages": [{"role": "robot", "content": "a"}]},
    {"messages": [{"role": "user", "content": 1}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [user("a")], "tools": "abc"}, {"messages": [user("a")], "tools": [1]},
    {"messages": [user("a")], "n": 2}, {"messages": [user("a")], "stop": ["x"]},
    {"messages": [user("a"), {"role": "assistant", "tool_calls": 3}]},
    {"messages": [user("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    {"messages": [user("a"), {"role": "assistant", "tool_calls": [{"function": 1}]}]},
    {"messages": [user("abcdefgh" * 100)]},
]  # fmt: skip


class SendsWrong(Agent):
    """Sends an invalid request, then a valid one."""

    def run(self, base_url, api_key, row):
        import json
        import urllib.error
        import urllib.request

        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps(WRONG[row["number"]]).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20):
                return 0.0
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 400 or not json.loads(error.read())["error"]["message"]:
                    return 0.0
        ask(client_of(base_url, api_key), [user("a")])
        return 1.0


class RunsVerifiers(Agent):
    """Runs a task of verifiers in its virtual environment."""

    def run(self, base_url, api_key, row):
        command = [os.environ["LIGHTNING_RLHF_VERIFIERS_PYTHON"], str(Path(__file__).with_name("verifiers_agent.py"))]
        result = subprocess.run(
            [*command, base_url, "b"],
            env={**os.environ, "POLICY_KEY": api_key},
            capture_output=True,
            text=True,
            check=True,
        )
        return float(result.stdout.split()[-1])


class Misbehaves(Agent):
    """Fails in the way given in its row."""

    def run(self, base_url, api_key, row):
        client = client_of(base_url, api_key)
        if row["fault"] == "silent":
            return 1.0
        ask(client, [user("a")])
        if row["fault"] == "raise":
            raise ValueError("lost")
        if row["fault"] == "die":
            os._exit(1)
        if row["fault"] == "hang":
            threading.Event().wait()
        if row["fault"] == "text":
            return "good"
        return 1.0


class Sleeps(Agent):
    """Waits between its turns."""

    async def run(self, base_url, api_key):
        await asyncio.sleep(3600)
