"""Imports of the process from which ranks are forked; see :func:`tests.distributed.launch.run_ranks`."""

import importlib

import torch  # noqa: F401

import lightning_rlhf
import tests.distributed.tasks  # noqa: F401

for _name in lightning_rlhf.__all__:
    getattr(lightning_rlhf, _name)
for _name in ("llama.modeling_llama", "auto.modeling_auto"):
    importlib.import_module(f"transformers.models.{_name}")
