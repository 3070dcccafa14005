"""Judges behind a real vLLM server: grades and rankings by structured output, and its prefix cache."""

import asyncio
import os
import re
import signal
import string
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.judges.asking import Judge
from lightning_rlhf.extras.judges.endpoint import Endpoint
from lightning_rlhf.extras.judges.ranking_reward import RankingReward
from lightning_rlhf.extras.judges.rubric import Criterion, Rubric, Scale
from lightning_rlhf.extras.judges.rubric_reward import RubricReward
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.distributed.launch import free_port
from tests.rollout.engines import ARCHITECTURE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
RUBRIC = Rubric([Criterion(f"c{number}", f"Is it good in way {number}?", scale=Scale(0, 3)) for number in range(6)])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of a small chat model with random weights."""
    directory = tmp_path_factory.mktemp("judge")
    shape = {**ARCHITECTURE, "vocab_size": 100, "max_position_embeddings": 8192}
    FromConfig(shape, seed=0).causal().save_pretrained(directory)
    tokenizer = CharacterTokenizer(string.printable[:95] + "\n").load()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--served-model-name", "judge",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
    with (directory / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, (directory / "server.log").read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health", timeout=1, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judge(server, **options):
    endpoint = Endpoint(f"{server}/v1/chat/completions", timeout_s=300)
    return Judge(endpoint, "judge", max_answer_tokens=1500, temperature=1.0, **options)


def prefix_tokens(server):
    """Return the tokens of all requests so far, and those that the prefix cache had."""
    text = httpx.get(f"{server}/metrics", timeout=30, trust_env=False).text
    return [
        float(re.search(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)[1])
        for name in ("queries", "hits")
    ]


def test_model_that_writes_at_random_grades_on_the_scale_and_shares_the_text_of_a_response(server, tmp_path):
    reward = RubricReward(RUBRIC, judge(server, answers=str(tmp_path / "answers.jsonl")))
    before = prefix_tokens(server)
    logged = {}
    (value,) = asyncio.run(reward(["why? " * 80], ["because. " * 80], log_metric=logged.__setitem__))
    queries, hits = (after - earlier for after, earlier in zip(prefix_tokens(server), before, strict=True))
    grades = [logged[f"c{number}"] for number in range(6)]
    assert all(grade in (0.0, 1 / 3, 2 / 3, 1.0) for grade in grades)
    assert value == pytest.approx(sum(grades) / 6)
    print(f"prefix cache: {hits:.0f} of {queries:.0f} tokens")
    assert hits > 0.6 * queries  # five of six requests found all before the criterion
    assert asyncio.run(reward(["why? " * 80], ["because. " * 80])) == [value]
    reward.close()


def test_model_that_writes_at_random_ranks_in_the_end_and_names_what_it_wrote_before(server):
    reward = RankingReward(judge(server), max_unranked=1.0)
    values, tries = [None], 0
    while values[0] is None and tries < 40:  # every second answer has both labels, and one that has is kept
        values = asyncio.run(reward(["why?"] * 2, ["a", "b"]))
        tries += 1
    assert sorted(values) in ([0.0, 1.0], [0.5, 0.5])
    with pytest.raises(RuntimeError, match=r"the answer of judge judge .* was cut at max_answer_tokens=5: '\{"):
        asyncio.run(RankingReward(replace(judge(server), max_answer_tokens=5))(["why?"] * 2, ["a", "b"]))
    reward.close()
