"""The options of TRL that a file sets, as TRL reads them, and the sizes of its batches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.given import GivenOptions

_NULLS = {  # what null stands for, where it is not the default
    "vllm_importance_sampling_clip_max": math.inf,
    "shuffle_dataset": False,
    "max_grad_norm": 0.0,
}
_LISTS = ("report_to", "reward_funcs", "reward_weights", "datasets")  # options of which one value is a list of it


class TRLOptions(GivenOptions):
    """Options of a trainer of TRL, and the sizes of its batches.

    TRL generates the texts of ``steps_per_generation`` batches at once, and an update has
    ``gradient_accumulation_steps`` of them. A step here is what is generated at once, with all of its updates. With
    batches of 8, an accumulation of 2 and 4 batches per generation, one device has updates of 16 texts and steps of 32.

    Every option of a file must end up in the configuration or in a line. Four verbs say which:

    - ``carry(name)`` returns the value, which then counts as carried over; so read an option wherever its value counts,
      and only there: what is read for nothing is lost without a line.
    - ``settle(names)`` counts options as carried over whose values need nothing here.
    - ``leave(name, reason)`` lists an option, read or not.
    - ``note(text)`` lists what is not one option.

    Args:
        options: options by their names, as in the file.
        defaults: TRL's defaults of the trainer's options.
        trainer: trainer, such as ``grpo``.
        devices: number of processes of the run of TRL, by which its batch counts.
    """

    def __init__(self, options: Mapping[str, Any], defaults: Mapping[str, Any], trainer: str, devices: int) -> None:
        read = {str(name): _as_read(str(name), value) for name, value in options.items()}
        super().__init__({name: value for name, value in read.items() if value not in (None, "", [], {})}, defaults)
        self.nulls = {name for name, value in options.items() if value is None}
        self.trainer, self.devices = trainer, devices
        self.is_online = trainer in ("grpo", "rloo")

    def eval_strategy(self) -> str:
        """Return when TRL validates: ``no``, ``steps`` or ``epoch``."""
        today, earlier = self.carry("eval_strategy"), self.carry("evaluation_strategy")
        return str(earlier if today == "no" else today)

    def texts_of_batches(self, batches: Any) -> int:
        """Return the texts of a number of batches, over all devices."""
        return int(self.carry("per_device_train_batch_size")) * int(batches) * self.devices

    def texts_of_update(self) -> int:
        """Return the texts of an update, over all devices."""
        return self.texts_of_batches(self.carry("gradient_accumulation_steps"))

    def texts_of_step(self) -> int:
        """Return the texts of a step here."""
        if not self.is_online:
            return self.texts_of_update()
        size, batches = self.carry("generation_batch_size"), self.carry("steps_per_generation")
        if size:
            return int(size)
        return self.texts_of_batches(batches) if batches else self.texts_of_update()

    def steps(self, updates: int) -> int:
        """Return the fewest steps here that contain so many of TRL's updates."""
        if not self.is_online:
            return updates
        texts = self.texts_of_step() * int(self.carry("num_iterations"))
        return math.ceil(updates * self.texts_of_update() / texts)


def _as_read(name: str, value: Any) -> Any:
    """Return a value as TRL reads it: a mapping may be JSON, a list one plain value, and YAML's ``no`` is False."""
    if name.endswith(("_kwargs", "_config")) and isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise UsageError(f"{name} is not a mapping in JSON: {error}") from error
    if value is None:
        return _NULLS.get(name)
    if value is False and name.endswith("_strategy"):
        return "no"
    if value is False and name == "report_to":
        return ["none"]
    return [value] if name in _LISTS and value and not isinstance(value, list) else value
