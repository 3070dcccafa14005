"""Costs besides the steps: ``python -m benchmarks.compare.costs DIRECTORY``.

Prints JSON with processor seconds of a push of weights beside a copy of the same bytes, of generation by VLLMEngine
beside ``vllm.LLM`` with the same requests, and of commands that start.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.compare import task

PUSHED = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
COMMANDS = {
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "lightning-rlhf --help": [sys.executable, "-m", "lightning_rlhf", "--help"],
    "lightning-rlhf fit --config ... --print_config": [
        sys.executable, "-m", "lightning_rlhf", "fit", "--config", "configs/quickstart/sft.yaml", "--print_config",
    ],
}  # fmt: skip
TURNS = 3


def own_seconds() -> float:
    """Return the processor seconds of this process."""
    times = os.times()
    return times.user + times.system


def seconds_of_children() -> float:
    """Return the processor seconds of the running child processes."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children)


def median_of(measured: list[float]) -> float:
    """Return the median without the first measurement, which allocates memory."""
    return statistics.median(measured[1:])


def push_costs(directory: Path) -> dict[str, float]:
    """Measure pushes of a model of 58 M parameters, and copies of its weights."""
    from lightning_rlhf.models.loading import FromConfig, save_architecture
    from lightning_rlhf.models.tensors import whole_tensors
    from lightning_rlhf.rollout.engine import EngineSetup
    from lightning_rlhf.rollout.vllm.engine import VLLMEngine

    source = FromConfig(PUSHED)
    model = source.causal().lm
    save_architecture(source, directory / "pushed")
    parameters = [tensor.detach() for tensor in model.parameters()]
    copy = torch.empty(sum(tensor.numel() for tensor in parameters))

    def copy_all() -> None:
        for part, tensor in zip(copy.split([tensor.numel() for tensor in parameters]), parameters, strict=True):
            part.copy_(tensor.flatten())

    engine = VLLMEngine()
    engine.start(EngineSetup(directory / "pushed", "float32", 256, directory / "pushed.log"))
    copied, trainer, loaded = [], [], []
    try:
        engine.wait()
        for version in range(1 + TURNS):
            before = own_seconds()
            copy_all()
            copied.append(own_seconds() - before)
            before, loaded_before = own_seconds(), seconds_of_children()
            engine.update_weights(whole_tensors(model), version)
            trainer.append(own_seconds() - before)
            loaded.append(seconds_of_children() - loaded_before)
    finally:
        engine.close()
    return {
        "megabytes": copy.nbytes / 1e6,
        "copy": median_of(copied),
        "trainer": median_of(trainer),
        "engine": median_of(loaded),
    }


def requests(directory: Path) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of a GRPO step, each as often as it has responses, and a seed for each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer", trust_remote_code=False)
    lines = (directory / "problems.jsonl").read_text().splitlines()[: task.CHAINS.prompts]
    texts = [json.loads(line)["prompt"] for line in lines]
    tokenized = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompts = [prompt for prompt in tokenized for _ in range(task.CHAINS.group)]
    return prompts, list(range(len(prompts)))


def generation_by_engine(directory: Path) -> dict[str, float]:
    """Measure VLLMEngine, with its process."""
    from lightning_rlhf.models.loading import Pretrained, save_architecture
    from lightning_rlhf.models.tensors import whole_tensors
    from lightning_rlhf.rollout.engine import EngineSetup
    from lightning_rlhf.rollout.generation import generate
    from lightning_rlhf.rollout.vllm.engine import VLLMEngine
    from lightning_rlhf.types import SamplingParams

    source = Pretrained(str(directory / "model"))
    save_architecture(source, directory / "generating")
    engine = VLLMEngine()
    engine.start(EngineSetup(directory / "generating", "float32", 128, directory / "generating.log"))
    prompts, seeds = requests(directory)
    sampling = SamplingParams(task.CHAINS.response_tokens, stop_token_ids=(task.END,))
    try:
        engine.wait()
        engine.update_weights(whole_tensors(source.causal().lm), 0)

        def generated() -> int:
            return sum(len(each.token_ids) for each in generate(engine, prompts, sampling, seeds))

        return tokens_per_second(generated, lambda: own_seconds() + seconds_of_children())
    finally:
        engine.close()


def generation_by_vllm(directory: Path) -> dict[str, float]:
    """Measure ``vllm.LLM`` in this process."""
    from lightning_rlhf.launch_environment import engine_environment
    from lightning_rlhf.rollout.engine import EngineSetup
    from lightning_rlhf.rollout.vllm.engine import VLLMEngine

    os.environ.update(engine_environment(os.environ, False, "float32"))
    from vllm import LLM, SamplingParams, TokensPrompt

    setup = EngineSetup(directory / "model", "float32", 128, directory / "raw.log")
    llm = LLM(**{**VLLMEngine().llm_arguments(setup), "load_format": "auto"})
    prompts, seeds = requests(directory)
    sampling = [
        SamplingParams(max_tokens=task.CHAINS.response_tokens, stop_token_ids=[task.END], seed=seed, logprobs=0,
                       detokenize=False, ignore_eos=True, flat_logprobs=True)
        for seed in seeds
    ]  # fmt: skip
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]

    def generate() -> int:
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(inputs, sampling, use_tqdm=False))

    return tokens_per_second(generate, own_seconds)


def tokens_per_second(generate: Callable[[], int], seconds: Callable[[], float]) -> dict[str, float]:
    """Measure generated tokens per processor second."""
    rates = []
    for _ in range(1 + TURNS):
        before = seconds()
        tokens = generate()
        rates.append(tokens / (seconds() - before))
    return {"tokens_per_cpu_s": median_of(rates)}


def start_costs() -> dict[str, float]:
    """Measure commands until they end."""
    costs = {}
    for name, command in COMMANDS.items():
        measured = []
        for _ in range(TURNS):
            before = os.times()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = os.times()
            measured.append(after.children_user + after.children_system - before.children_user - before.children_system)
        costs[name] = statistics.median(measured)
    return costs


def main(directory: str, part: str = "") -> None:
    """Print the costs; each part is measured in a separate process."""
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "push": lambda: push_costs(Path(directory)),
        "engine": lambda: generation_by_engine(Path(directory)),
        "vllm": lambda: generation_by_vllm(Path(directory)),
        "start": start_costs,
    }
    if part:
        Path(directory, f"costs-{part}.json").write_text(json.dumps(parts[part]()))
        return
    costs_by_part: dict[str, Any] = {}
    for name in parts:
        command = [sys.executable, "-m", "benchmarks.compare.costs", directory, name]
        with Path(directory, f"costs-{name}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        costs_by_part[name] = json.loads(Path(directory, f"costs-{name}.json").read_text())
    print(json.dumps(costs_by_part))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
