"""The command with vLLM: requests under load, and shutdown."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.commands import generate as generating
from lightning_rlhf.extras.commands.responses_file import read_lines
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import LoRA, is_adapter
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.models.test_lora import parameters_of, randomize_adapters
from tests.rollout.engines import ARCHITECTURE, greedy
from tests.vision_models import drawing, write_checkpoint

ROOT = Path(__file__).resolve().parents[3]
KEY = "a-key-for-this-test-only"
BEARER = {"Authorization": f"Bearer {KEY}"}
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]


@contextmanager
def started(directory, model, *arguments):
    """Run the command in a separate process, which is killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SERVE_KEY": KEY}
    line = [sys.executable, "-m", "lightning_rlhf", "serve", "--model", str(model), "--port", "0", *arguments]
    with (directory / "out").open("wb") as output:
        process = subprocess.Popen(line, env=environment, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
    with process:
        try:
            yield process
        finally:
            process.kill()


def printed(process, directory, expected, seconds=600):
    """Wait for a text in the output and return the output."""
    end = time.monotonic() + seconds
    while expected not in (text := (directory / "out").read_text()):
        assert process.poll() is None, text
        assert time.monotonic() < end, text
        time.sleep(0.1)
    return text


def family(pid):
    """Return the ids of all descendants of a process."""
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            result += [int(path.parent.name), *family(int(path.parent.name))]
    return result


def gone(pids, seconds=40):
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and pid in alive()]:
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return []


def alive():
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.exists() and ") Z " not in path.read_text()
    ]


def shell(text, environment=None):
    """Return the output of commands as JSON."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["sh", "-c", text]
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def server(tmp_path_factory, served_model):
    directory = tmp_path_factory.mktemp("serve")
    limits = ("--api-key-env", "SERVE_KEY", "--name", "policy", "--max-tokens", "24", "--concurrency", "20")
    with started(directory, served_model, *limits) as process:
        text = printed(process, directory, "curl ")
        yield re.search(r"http://127\.0\.0\.1:\d+", text)[0], process, text


def ask(url, route, **body):
    return httpx.post(f"{url}{route}", json={"model": "policy", **body}, headers=BEARER, timeout=120, trust_env=False)


def test_completions_and_chats_answer_and_seeds_repeat_them(server):
    url, _, _ = server
    one, again = (ask(url, "/v1/completions", prompt="hello", seed=3, max_tokens=9).json() for _ in range(2))
    assert one["choices"][0]["text"] == again["choices"][0]["text"]
    assert one["usage"]["completion_tokens"] <= 9
    other = ask(url, "/v1/completions", prompt="hello", seed=4, max_tokens=9).json()
    assert other["choices"][0]["text"] != one["choices"][0]["text"]
    messages = [{"role": "user", "content": "hi"}]
    chat = ask(url, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=5).json()
    text = ask(url, "/v1/completions", prompt="user: hi\nassistant: ", temperature=0, max_tokens=5).json()
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    unsaid = ask(url, "/v1/completions", prompt="hello", temperature=0).json()
    assert unsaid["usage"]["completion_tokens"] <= 24  # the limit applies to requests without one


def test_printed_example_command_gets_an_answer(server):
    _, _, text = server
    command = text.rstrip().splitlines()[-1]
    assert "/v1/chat/completions" in command
    answer = shell(command, {"SERVE_KEY": KEY})
    assert answer["choices"][0]["message"]["content"]


def test_stream_adds_up_to_the_whole_answer(server):
    url, _, _ = server
    body = {"model": "policy", "prompt": "hello", "seed": 3, "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=BEARER, timeout=120) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert len(pieces) > 3
    whole = ask(url, "/v1/completions", prompt="hello", seed=3, max_tokens=9).json()
    assert "".join(pieces) == whole["choices"][0]["text"]


def test_key_is_required_limits_apply_and_the_key_is_not_shown(server):
    url, _, text = server
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=BEARER).json()["data"][0]["id"] == "policy"
    assert "vllm" in httpx.get(f"{url}/metrics", headers=BEARER).text
    assert ask(url, "/v1/completions", prompt="x", max_tokens=25).status_code == 422
    assert ask(url, "/v1/completions", prompt="x" * 257).status_code == 422
    assert ask(url, "/v1/completions", prompt=[99999]).status_code == 400  # vLLM's own refusal
    assert ask(url, "/tokenize", prompt="x").status_code == 404
    assert KEY not in text
    assert '"Authorization: Bearer $SERVE_KEY"' in text


def test_server_is_local_and_sockets_of_vllm_are_in_a_private_folder(server):
    url, process, _ = server
    sockets = {os.readlink(link) for pid in family(process.pid) for link in Path(f"/proc/{pid}/fd").iterdir()}
    numbers = {name[8:-1] for name in sockets if name.startswith("socket:[")}
    rows = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[9] in numbers]
    assert f"0100007F:{int(url.rpartition(':')[2]):04X}" in listening
    assert all(address.startswith(("0100007F:", "00000000000000000000000001000000:")) for address in listening), (
        listening
    )
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = [Path(row[7]) for row in rows if row[6] in numbers and len(row) == 8 and row[7].startswith("/")]
    assert len(paths) >= 2  # between the server and its engine
    assert {path.parent.stat().st_mode & 0o777 for path in paths} == {0o700}


def test_key_is_neither_on_a_command_line_nor_in_the_environment(server):
    _, process, _ = server
    for pid in family(process.pid):
        for name in ("cmdline", "environ"):
            assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_generate_sends_fifty_requests_at_a_time(server, tmp_path, monkeypatch, capsys):
    url, _, _ = server
    monkeypatch.setenv("SERVE_KEY", KEY)
    rows = [{"prompt": f"compute {i}"} for i in range(40)]
    rows += [{"prompt": [{"role": "user", "content": f"write {i}"}]} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = ["--server", url, "--api-key-env", "SERVE_KEY", "--prompts", str(tmp_path / "prompts.jsonl")]
    for name, size in (("a", "80"), ("b", "33")):
        to = str(tmp_path / f"{name}.jsonl")
        code = generating.run([*inputs, "--to", to, "-n", "2", "--max-tokens", "8", "--batch-size", size])
        assert code == 0, capsys.readouterr().err
    result = read_lines(tmp_path / "a.jsonl")
    assert [row["prompt"] for row in result] == [row["prompt"] for row in rows]
    assert all(len(row["responses"]) == 2 and max(row["response_tokens"]) <= 8 for row in result)
    assert len({text for row in result for text in row["responses"]}) > 120
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_hundreds_of_simultaneous_requests_are_answered_or_temporarily_rejected(server):
    url, _, _ = server
    with ThreadPoolExecutor(100) as threads:
        answers = list(threads.map(lambda i: ask(url, "/v1/completions", prompt=f"{i}", max_tokens=2), range(300)))
    statuses = {answer.status_code for answer in answers}
    assert statuses <= {200, 429}
    assert 200 in statuses
    assert ask(url, "/v1/completions", prompt="x", max_tokens=2).status_code == 200


def test_killed_server_leaves_no_process(server):  # the last: the server is gone then
    _, process, _ = server
    pids = family(process.pid)
    assert len(pids) >= 2  # the server, its engine
    process.kill()
    process.wait()
    assert gone(pids) == []


def test_digit_model_gets_a_digit_example_and_its_end_token_ends_answers(tmp_path):
    FromConfig({**ARCHITECTURE, "vocab_size": 18}, seed=0).causal().save_pretrained(tmp_path / "digits")
    CharacterTokenizer("0123456789+=").load().save_pretrained(tmp_path / "digits")
    with started(tmp_path, tmp_path / "digits", "--max-tokens", "6") as process:
        text = printed(process, tmp_path, "curl ")
        answer = shell(text.partition("another shell:")[2])
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 6}
        assert answer["usage"]["completion_tokens"] <= 6
        pids = family(process.pid)
        os.kill(next(pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()), signal.SIGKILL)
        assert process.wait(60) == 1
    assert gone(pids) == []
    assert "lightning-rlhf: vLLM ended; vllm.log ends with:" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_with_code_0_and_its_children(tmp_path, served_model, number):
    with started(tmp_path, served_model) as process:
        printed(process, tmp_path, "loading")
        end = time.monotonic() + 60
        while len(pids := family(process.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(120) == 0
    assert gone(pids) == []


def test_vllm_start_failure_is_reported_with_its_last_output(tmp_path, served_model):
    with started(tmp_path, served_model, "--max-model-len", "100000") as process:
        assert process.wait(600) == 1
    text = (tmp_path / "out").read_text()
    assert "lightning-rlhf: vLLM ended; vllm.log ends with:" in text
    assert "max_model_len" in text
    assert "Traceback" not in text.partition("lightning-rlhf: vLLM ended")[0]


def test_requests_select_an_adapter_by_its_name(served_model, tmp_path):
    adapters = {"one": tmp_path / "one", "other": tmp_path / "other"}
    for factor, directory in zip((1.0, -0.7), adapters.values(), strict=True):
        model = randomize_adapters(Pretrained(str(served_model), lora=LoRA(4, 32)).causal())
        weights = {name: factor * tensor for name, tensor in parameters_of(model.lm).items() if is_adapter(name)}
        save_adapter(LoRA(4, 32), weights, directory, str(served_model), model.adapter_metadata)
    options = [f"--adapter={name}={directory}" for name, directory in adapters.items()]
    with started(tmp_path, served_model, "--api-key-env", "SERVE_KEY", "--name", "policy", *options) as process:
        url = re.search(r"http://127\.0\.0\.1:\d+", printed(process, tmp_path, "curl "))[0]
        listed = httpx.get(f"{url}/v1/models", headers=BEARER, trust_env=False).json()["data"]
        assert {model["id"] for model in listed} == {"policy", *adapters}
        prompt = {"prompt": "hello there", "temperature": 0, "max_tokens": 12}
        texts = {
            name: ask(url, "/v1/completions", **prompt, model=name).json()["choices"][0]["text"]
            for name in ("policy", *adapters)
        }
        assert ask(url, "/v1/completions", **prompt, model="absent").status_code == 404
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    ids = tokenizer("hello there", add_special_tokens=False)["input_ids"]
    sources = {name: Pretrained(str(served_model), adapter=str(path)) for name, path in adapters.items()}
    for name, source in {"policy": Pretrained(str(served_model)), **sources}.items():
        expected = tokenizer.decode(greedy(source.causal(), ids, 12), skip_special_tokens=True)
        assert texts[name] == expected, name
    assert len(set(texts.values())) == 3


def test_chats_with_images_are_answered(tmp_path):
    model = write_checkpoint("idefics3", tmp_path / "model")
    arguments = ("--api-key-env", "SERVE_KEY", "--name", "policy", "--max-images", "1", "--max-model-len", "256")
    with started(tmp_path, model, *arguments) as process:
        text = printed(process, tmp_path, "curl ")
        url = re.search(r"http://127\.0\.0\.1:\d+", text)[0]

        def answer(*numbers):
            parts = [{"type": "image_url", "image_url": {"url": drawing(number).data_url()}} for number in numbers]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
            return ask(url, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=8, logprobs=True)

        def logprobs(response):
            return [token["logprob"] for token in response.json()["choices"][0]["logprobs"]["content"]]

        one, again, other, none = (logprobs(answer(*numbers)) for numbers in ((1,), (1,), (2,), ()))
        assert one == pytest.approx(again, abs=1e-5)
        assert one != pytest.approx(other, abs=1e-3)
        assert one != pytest.approx(none, abs=1e-3)
        rejected = answer(1, 2)
        assert (rejected.status_code, "allowed are 1" in rejected.text) == (422, True)


def test_images_for_a_model_of_texts_are_an_error(tmp_path, served_model):
    with started(tmp_path, served_model, "--max-images", "2") as process:
        assert process.wait(timeout=120) == 2
    assert f"--max-images: {served_model} is a llama, which reads texts only" in (tmp_path / "out").read_text()
