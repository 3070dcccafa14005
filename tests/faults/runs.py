"""Tiny runs for the fault tests: their configuration, how to kill and resume them, and how to compare their results."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import yaml
from lightning.pytorch import Callback

from lightning_rlhf.rollout.vllm import engine as vllm_engine
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.role_files import StoredRole
from tests import figures

KILLED = -signal.SIGKILL
ROOT = Path(__file__).parents[2]
_VARYING = ("time/", "perf/")  # and names that end with tokens_per_s

LLAMA = {
    "model_type": "llama",
    "vocab_size": 18,
    "hidden_size": 32,
    "head_dim": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODEL = {"class_path": "lightning_rlhf.FromConfig", "init_args": {"architecture": LLAMA}}
TOKENIZER = {
    "class_path": "lightning_rlhf.data.tokenizers.CharacterTokenizer",
    "init_args": {"characters": "0123456789+=: "},
}
_ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 3.0e-3, "weight_decay": 0.0}}
_DECAY = {
    "class_path": "torch.optim.lr_scheduler.LinearLR",
    "init_args": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 12},
}


def digits(completions):
    """Return the fraction of digits plus a random number from every generator."""

    def luck():
        return (random.random() + numpy.random.rand() + torch.rand(()).item()) / 100

    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) + luck() for text in completions]


def slow_digits(completions):
    """Return the fraction of digits after some time, without any random numbers."""
    time.sleep(0.3)
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def problems(kind, rows, **more):
    return {"class_path": f"lightning_rlhf.tasks.addition.{kind}", "init_args": {"num_rows": rows, **more}}


def data(kind, rows):
    return {
        "tokenizer": TOKENIZER,
        "train": problems(rows, 22),  # 5 batches of 4, and 2 rows that fill none
        "val": problems(rows, 6, held_out=True),  # 2 batches
        "batch_size": 4,
        "max_tokens": 64,
    }


def callback(name, **arguments):
    return {"class_path": f"lightning_rlhf.callbacks.{name}", "init_args": arguments}


def checkpoints(every, best, background):
    both = {"every_n_steps": every}, {"best": best}
    return [callback("RunCheckpoint", background=background, **arguments) for arguments in both]


CORRECTION = {
    "class_path": "lightning_rlhf.objectives.corrections.RolloutCorrection",
    "init_args": {"level": "token"},
}


CONVERSATIONS = {
    "factory": "tests.environments.worlds:Remembers",
    "bridge": "plain",
    "max_turns": 3,
    "max_turn_tokens": 5,
    "concurrency": 2,
}


def ppo(every=2, engine="TransformersEngine", background=True, max_staleness=0, environment=None, **trainer):
    """Return 12 steps over 2.4 epochs: two models, schedulers, KL control; validations at and between checkpoints."""
    module = "transformers" if engine == "TransformersEngine" else "vllm.engine"
    ahead = {"max_staleness": max_staleness} if max_staleness else {}
    ahead |= {"environment": environment} if environment else {}
    return {
        "seed_everything": 7,
        "model": {
            "class_path": "lightning_rlhf.PPOModule",
            "init_args": {
                "actor": MODEL,
                "kl_reward": {"coef": 0.1},
                "optimizer": _ADAM,
                "critic_optimizer": _ADAM,
                "lr_scheduler": _DECAY,
                "critic_lr_scheduler": _DECAY,
                "update_epochs": 2,
                "minibatch_size": 4,
                **({"correction": CORRECTION} if max_staleness else {}),
            },
        },
        "data": {"class_path": "lightning_rlhf.PromptDataModule", "init_args": data("prompts", "Problems")},
        "trainer": {
            "accelerator": "cpu",
            "default_root_dir": "run",
            "callbacks": [
                callback(
                    "RolloutLoop",
                    rewards=[{"function": "tests.faults.runs.digits"}],
                    engine={"class_path": f"lightning_rlhf.rollout.{module}.{engine}"},
                    group_size=2,
                    max_response_tokens=24 if environment else 6,
                    val_samples=2,
                    **ahead,
                ),
                callback(
                    "KLControl",
                    controller={
                        "class_path": "lightning_rlhf.objectives.kl_controllers.AdaptiveKL",
                        "init_args": {"target": 0.5, "horizon": 32},
                    },
                ),
                callback("RolloutLog", table_every_n_steps=0),
                *checkpoints(every, "val/digits_sampled", background),
                callback("Report"),
            ],
            **(trainer or {"max_steps": 12, "val_check_interval": 3, "check_val_every_n_epoch": None}),
        },
    }


def supervised(kind):
    """Return two epochs of 5 steps of SFT or of a reward model, with a validation after each."""
    sft = kind == "sft"
    rows, module, role = (
        ("Demonstrations", "SFTModule", "actor") if sft else ("Preferences", "RewardModule", "reward_model")
    )
    more = [] if sft else [
        callback("PolicyCheck", policy=MODEL, prompts=problems("Problems", 6), num_samples=6, max_response_tokens=4,
                 rule={"function": "lightning_rlhf.tasks.addition.exact"})
    ]  # fmt: skip
    return {
        "seed_everything": 7,
        "model": {
            "class_path": f"lightning_rlhf.{module}",
            "init_args": {role: MODEL, "optimizer": _ADAM, "lr_scheduler": _DECAY},
        },
        "data": {
            "class_path": f"lightning_rlhf.{'Conversation' if sft else 'Preference'}DataModule",
            "init_args": data(kind, rows),
        },
        "trainer": {
            "accelerator": "cpu",
            "default_root_dir": "run",
            "max_epochs": 2,
            "callbacks": [*more, callback("RunCheckpoint", every_n_steps=2)],
        },
    }


class Forge:
    """Processes that run the command line and are killed at given points; see forge.py."""

    def __init__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forge"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def attempt(self, directory, config, *, resume=None, position=None, calls=None, arguments=(), command="fit"):
        """Run one process and return its result: 0, an exit code, or KILLED."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        line = [command, "--config", "config.yaml", *(["--ckpt_path", resume] if resume else []), *arguments]
        request = {"directory": str(directory), "arguments": line, "position": position, "calls": calls}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the forge itself died"
        return int(answer)

    def finish(self, directory, config, deaths):
        """Run, die at each of the deaths in turn, resume after each, then finish; return the number of deaths."""
        killed, resume = 0, None
        for death in [*deaths, {}]:
            ended = self.attempt(directory, config, resume=resume, **death)
            assert ended in (0, KILLED), f"exit code {ended}:\n{output(directory)[-4000:]}"
            killed += ended == KILLED
            resume = "last"
        assert ended == 0
        figures.record("kills", killed)
        return killed

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def output(directory):
    """Return the output of all processes of a run."""
    return (directory / "output.log").read_text()


def rows(directory):
    """Return metrics.csv without times and speeds: a list of (column, value) pairs per row, in order."""
    with (directory / "run" / "metrics.csv").open(newline="") as file:
        return [[(k, v) for k, v in row.items() if not varies(k)] for row in csv.DictReader(file)]


def varies(name):
    return name.startswith(_VARYING) or name.endswith("tokens_per_s")


def checkpoint(directory, name="last"):
    """Return a checkpoint without times and speeds: the state outside of roles, and that of each role."""
    version = manifest.verified(directory / "run" / "checkpoints" / f"{name}.ckpt")
    state = torch.load(version / "state.pt", weights_only=True)
    metrics = state["lightning_rlhf"]["metrics"]
    state["lightning_rlhf"]["metrics"] = {k: v for k, v in metrics.items() if not varies(k)}
    names = state["logged_names"]
    state["logged_names"] = {part: [name for name in names[part] if not varies(name)] for part in names}
    for folder in sorted(path for path in version.iterdir() if path.is_dir()):
        role = StoredRole(folder)
        tensors = {key: torch.zeros(role.shapes[key], dtype=role.dtypes[key]) for key in sorted(role.shapes)}
        role.read(tensors)
        state[f"role {folder.name}"] = {"tensors": tensors, "settings": role.settings}
    return state


def difference(ours, theirs, at=""):
    """Return where two nested values first differ by a bit, or None."""
    if type(ours) is not type(theirs):
        return f"{at}: {type(ours).__name__} and {type(theirs).__name__}"
    if isinstance(ours, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        same = same and (ours.isnan().equal(theirs.isnan()) and ours.nan_to_num().equal(theirs.nan_to_num()))
        return None if same else f"{at}: tensors"
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return f"{at}: keys {list(ours)} and {list(theirs)}"
        return next((d for k in ours if (d := difference(ours[k], theirs[k], f"{at}/{k}"))), None)
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{at}: lengths {len(ours)} and {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((d for i, pair in pairs if (d := difference(*pair, f"{at}/{i}"))), None)
    return None if ours == theirs else f"{at}: {ours!r} and {theirs!r}"


def assert_same(directory, reference, names=("last", "best")):
    """Check that metrics, texts, weights, optimizers, counters, random state and the export are bitwise equal."""
    ours, theirs = rows(directory), rows(reference)
    assert [row[0] for row in ours] == [row[0] for row in theirs], "steps lost or doubled in metrics.csv"
    assert ours == theirs, [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    for name in (name for name in names if (reference / f"run/checkpoints/{name}.ckpt").exists()):
        result = difference(checkpoint(directory, name), checkpoint(reference, name))
        assert result is None, f"{name}.ckpt{result}"
    files, resumed = (
        sorted(path.relative_to(run) for path in run.glob("rollouts/**/*") if path.is_file())
        for run in (reference / "run", directory / "run")
    )
    assert files == resumed
    files += [Path("export/model.safetensors"), Path("export/config.json")]
    for file in files:
        assert (directory / "run" / file).read_bytes() == (reference / "run" / file).read_bytes(), file
    output = [json.loads((d / "run/export/metrics.json").read_text()) for d in (directory, reference)]
    ours, theirs = ({k: repr(v) for k, v in s.items() if not varies(k)} for s in output)  # NaN is not equal to itself
    assert ours == theirs
    reports = [d / "run/report.json" for d in (directory, reference)]
    if reports[1].exists():
        assert len({json.dumps(json.loads(report.read_text())["before"]) for report in reports}) == 1
    assert list((directory / "run").rglob("*.new*")) == []
    for folder in (directory / "run/checkpoints").iterdir():
        assert len(list(folder.iterdir())) == 2, f"leftovers in {folder}"


class MakesWorkersFaulty(Callback):
    """Makes the engine use tests.faults.faulty_worker.

    Args:
        most: largest number of faults.
    """

    def __init__(self, most: int) -> None:
        os.environ["MOST_FAULTS"] = str(most)
        vllm_engine.EngineProcess = partial(_start_process, vllm_engine.EngineProcess)


def _start_process(start: Any, module: str, *arguments: Any) -> Any:
    return start("tests.faults.faulty_worker", *arguments)


class KillsEngine(Callback):
    """Kills or stops child processes, such as the engine's, at random times of a run.

    Most deaths follow the end of a step, so that they are spread over the run; the others may kill a process that is
    still starting.

    Args:
        seed: seed of the times.
        deaths: number of deaths.
        number: signal.
        every: largest number of seconds before a death.
        word: part of the command line of the processes.
        after_steps: share of the deaths that follow the end of a step; with 1, no two are in the same step.
    """

    def __init__(
        self,
        seed: int,
        deaths: int,
        number: int = signal.SIGKILL,
        every: float = 4.0,
        word: str = "lightning_rlhf.rollout.vllm.worker",
        after_steps: float = 0.8,
    ) -> None:
        self._word, self._after_steps = word, after_steps
        self._random = random.Random(seed)
        self._deaths, self._number, self._every = deaths, number, every
        self._ended, self._step_ended = threading.Event(), threading.Event()

    def on_train_batch_end(self, *args: Any) -> None:
        self._step_ended.set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._thread.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._ended.set()
        self._step_ended.set()
        self._thread.join()

    def _kill(self) -> None:
        killed: set[int] = set()
        while len(killed) < self._deaths:
            if self._random.random() < self._after_steps:
                self._step_ended.clear()
                if not self._ended.is_set():
                    self._step_ended.wait()
            if self._ended.wait(self._random.random() * self._every):
                break
            children = psutil.Process().children()
            self._random.shuffle(children)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in killed and self._word in " ".join(child.cmdline()):
                        child.send_signal(self._number)
                        killed.add(child.pid)
                        break
        with open("killed", "a") as file:
            file.write(f"{len(killed)}\n")
