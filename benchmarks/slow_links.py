"""Are the bytes that ``plan`` counts those that a slow link carries? ``python -m benchmarks.slow_links`` measures it.

Two processes train in two network namespaces, each with a vLLM engine of its own, and the link between them gets one
rate after another (root and Linux only). The bytes are those of the link's own counter, for learning and for a push,
and are compared with what ``plan`` counts for the same configuration. A step takes a + b / rate seconds, where a is
computation: b, the seconds of a byte times the rate, shows how well the collectives of gloo use the link.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

from lightning_rlhf.extras.commands.run_config import parse_run_config
from lightning_rlhf.extras.plan import traffic
from lightning_rlhf.extras.plan.command import PlanCLI, run_of

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("rlhfa", "rlhfb")
ADDRESSES = ("10.77.20.1", "10.77.20.2")
STRATEGIES: dict[str, Any] = {
    "rlhf_ddp": "rlhf_ddp",
    "rlhf_fsdp": "rlhf_fsdp",  # shards within a node, so that only gradients of replicas cross the link
    "rlhf_fsdp, shard_size 2": {
        "class_path": "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy",
        "init_args": {"shard_size": 2},
    },
    "rlhf_deepspeed_stage_1": "rlhf_deepspeed_stage_1",
    "rlhf_deepspeed_stage_3": "rlhf_deepspeed_stage_3",
}
ARCHITECTURE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STEPS = 5


class LinkBytes(Callback):
    """Logs how many bytes this process sent while it learned, and between two updates, when weights are pushed."""

    def __init__(self) -> None:
        self.last = self.sent()
        self.pushed = 0

    @staticmethod
    def sent() -> int:
        """Return the bytes that the link has carried away from here."""
        (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
        return int(line.partition(":")[2].split()[8])

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin to count for learning; the rollout of the step is there."""
        self.pushed, self.last = self.sent() - self.last, self.sent()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log both numbers."""
        learned = self.sent() - self.last
        self.last = self.sent()
        pl_module.log_dict({"link/learning": float(learned), "link/push": float(self.pushed)}, batch_size=1)


def configuration(strategy: str, folder: Path) -> dict[str, Any]:
    """Return a run whose step has one micro-batch on each process."""
    tokenizer = {
        "class_path": "lightning_rlhf.data.tokenizers.CharacterTokenizer",
        "init_args": {"characters": "0123456789+=: "},
    }
    problems = {"class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": 512}}
    loop = {
        "rewards": [{"function": "lightning_rlhf.tasks.addition.exact"}],
        "group_size": 4,
        "max_response_tokens": 16,
        "validate_at_ends": False,
        "check_rows": 0,
    }
    actor = {"class_path": "lightning_rlhf.FromConfig", "init_args": {"architecture": ARCHITECTURE}}
    module = {"actor": actor, "kl_loss": {"coef": 0.001, "estimator": "k3"}, "micro_batch_tokens": 4096}
    return {
        "seed_everything": 1,
        "model": {"class_path": "lightning_rlhf.GRPOModule", "init_args": module},
        "data": {
            "class_path": "lightning_rlhf.PromptDataModule",
            "init_args": {"tokenizer": tokenizer, "train": problems, "batch_size": 8, "max_tokens": 16},
        },
        "trainer": {
            "accelerator": "cpu",
            "strategy": STRATEGIES[strategy],
            "max_steps": STEPS,
            "callbacks": [
                {"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": loop},
                {"class_path": "lightning_rlhf.callbacks.HealthChecks"},
                {"class_path": "benchmarks.slow_links.LinkBytes"},
            ],
            "default_root_dir": str(folder / "run"),
        },
    }


def ip(*words: str) -> None:
    """Change the network of this machine."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def machines(mbit: int) -> Iterator[None]:
    """Make two namespaces with a link of a rate between them."""
    try:
        try:
            make_link(mbit)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"this machine makes no network namespaces, which takes root on Linux: {error}") from None
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def make_link(mbit: int) -> None:
    """Make the namespaces and the link."""
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "200ms"]
        line = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *limit]
        subprocess.run(line, check=True, capture_output=True)


def measured(config: dict[str, Any], folder: Path, mbit: int) -> dict[str, tuple[float, float]]:
    """Train in both namespaces, and return median seconds and bytes of learning and push after the first step."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    variables = {
        **os.environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29655", "NODES": "2", "PROCESSES": "1",
        "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    command = [str(ROOT / "examples/cluster/torchrun.sh"), "--config", str(file)]
    with machines(mbit), (folder / "log").open("w") as log:
        nodes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command], env={**variables, "NODE_RANK": str(rank)}, cwd=folder,
                stdout=log, stderr=log,
            )
            for rank, name in enumerate(NAMES)
        ]  # fmt: skip
        codes = [node.wait() for node in nodes]
    if any(codes):
        ending = (folder / "log").read_text()[-3000:]
        raise SystemExit(f"{config['trainer']['strategy']} at {mbit} Mbit/s ended with {codes}:\n{ending}")
    (metrics,) = folder.glob("run/metrics.csv")
    with metrics.open(newline="") as text:
        rows = [row for row in csv.DictReader(text) if row.get("time/update_s")][1:]
    learning = [float(row["time/update_s"]) + float(row["time/evaluate_s"]) for row in rows]
    pushes = [float(row["time/sync_s"]) for row in rows]
    sent = {term: statistics.median(float(row[f"link/{term}"]) for row in rows) for term in ("learning", "push")}
    return {
        "learning": (statistics.median(learning), sent["learning"]),
        "push": (statistics.median(pushes), sent["push"]),
    }


def counted(config: dict[str, Any], folder: Path) -> dict[str, int]:
    """Return the bytes that ``plan`` counts for each process."""
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(config))
    parsed = parse_run_config(["--config", str(file), "--gpus", "2", "--nodes", "2"], PlanCLI)
    sent = traffic.traffic(run_of(parsed), 2)
    push = sent[traffic.PUSH]
    return {
        "learning": sum(size for term, size in sent.items() if term not in (traffic.PUSH, traffic.ENGINE)),
        "push": push,
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the line with the least squares."""
    x, y = (statistics.mean(values) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--rates", nargs="+", type=int, default=[50, 100, 200], help="Mbit/s")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    results = []
    print("| strategy | term | bytes counted | bytes sent | ratio | seconds at each rate | seconds of a byte x rate |")
    print("|---|---|--:|--:|--:|---|--:|")
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            expected = counted(configuration(strategy, folder), folder)
            taken = {}
            for rate in options.rates:
                place = folder / str(rate)
                place.mkdir()
                taken[rate] = measured(configuration(strategy, place), place, rate)
        for term, size in expected.items():
            sent = statistics.median(of[term][1] for of in taken.values())
            of_link = slope([(8 / (rate * 1e6), of[term][0]) for rate, of in taken.items()])
            shown = ", ".join(f"{rate} Mbit/s: {of[term][0]:.2f}" for rate, of in taken.items())
            ratio, use = (f"{sent / size:.2f}", f"{of_link / sent:.2f}") if size else ("-", "-")
            print(f"| `{strategy}` | {term} | {size:,} | {sent:,.0f} | {ratio} | {shown} | {use} |", flush=True)
            seconds = {rate: of[term][0] for rate, of in taken.items()}
            results.append({"strategy": strategy, "term": term, "counted": size, "sent": sent, "seconds": seconds})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
