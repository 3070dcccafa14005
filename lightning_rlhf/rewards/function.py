"""Reward functions of users: how they are specified, recognised by their signature, and called.

This file does not import torch, so that worker processes start fast.
"""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from lightning_rlhf.calls.private import private
from lightning_rlhf.calls.references import as_function
from lightning_rlhf.data.image_parts import user_message
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_ranges
from lightning_rlhf.rewards.results import RewardFailure, RewardOutput, RewardResult

GENERATED_COLUMNS = ("prompts", "completions", "completion_ids", "finished", "end_tokens")  # one entry per completion
ENVIRONMENT = "environment"  # name of the environment's reward
# Further ones with an environment; `conversations` are the messages after the prompt.
CONVERSATION_COLUMNS = ("conversations", "turns", "environment_rewards", "stop_reasons")
CALL_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")  # one per call
_ANSWERS = ("ground_truth", "solution", "answer", "answers", "label", "labels", "target")  # common names of one column
# Names whose metrics reward/<name> and val/<name>_greedy have another meaning; see docs/metrics.md.
_RESERVED_LABELS = {"mean", "max", "min", "std", "score", "from_model", "generated_mean", "missing_fraction"}
_RESERVED_LABELS |= {"after_kl_mean", "after_kl_max", "after_kl_min"}


@dataclass(frozen=True)
class Convention:
    """How one library calls a reward function.

    Args:
        marker: parameter name that identifies the convention; empty for this package's convention, which is also TRL's.
        columns: this package's column name for each parameter name of the library.
        per_sample: whether the function is called with a single completion instead of lists.
    """

    marker: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    per_sample: bool = False


_VERL_COLUMNS = {
    "solution_str": "completions",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
OURS = Convention()
VERL = Convention("solution_str", _VERL_COLUMNS, per_sample=True)
VERL_BATCH = Convention("solution_strs", {f"{name}s": column for name, column in _VERL_COLUMNS.items()})
OPENRLHF = Convention("queries", {"queries": "queries", "prompts": "prompts", "labels": "ground_truth"})


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, which your reward function receives under TRL's name ``trainer_state``.

    Args:
        global_step: finished steps (prompt batches).
        max_steps: steps of the run. -1 if only the number of epochs is limited.
        epoch: finished passes over the data.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0


@dataclass(frozen=True)
class RewardFunction:
    """Scores completions with a function of yours, with its weight and error handling (see docs/rewards.md).

    A call fails if it raises an exception, returns a value that is not a reward, or takes longer than ``timeout_s``.
    You may also return a result in OpenRLHF's form, ``{"rewards": ..., "scores": ..., "extra_logs": {...}}``. If you
    return a tuple for a completion, only its first number is used.

    If your function has a parameter ``images``, it receives the images of each prompt, a list of
    :class:`~lightning_rlhf.encoded_image.EncodedImage`, or None for a prompt without images. Prompts as text contain
    ``<image>`` in the place of each image.

    You can set attributes on the function. ``__name__`` is the name in logs (else the class name).
    ``per_sample = True`` sets the default of the argument. Set ``dry_call = False`` if a call costs money or needs a
    server or much memory. ``close()`` releases resources when the run ends, even after an error. Each call gets its own
    copy of ``arguments``, so keep a state, such as answers that were seen, in an object of a class.

    All rewards are computed before the forward passes with dynamic sampling, online DPO and REBEL, and for modules that
    override ``receive``, ``pop_rollout``, ``evaluate`` or ``training_step``. A function in the trainer's thread runs
    before them because it may use signals, as some parsers do for time limits.

    Args:
        function: callable, or its reference ``file.py:name`` or ``module:name``. In YAML also a dotted path or
            ``class_path``.
        weight: factor of the reward in the sum. 0 only logs it.
        name: name in logs. None uses the function's own name.
        arguments: further keyword arguments of every call. For a class, arguments of its constructor.
        messages: whether to pass prompts and completions as lists of chat messages, as in TRL, instead of text. The
            content of a message with images is a list of parts: ``{type: text, text: ...}`` and
            ``{type: image, image: ...}`` with an ``EncodedImage``.
        per_sample: whether to score each completion in a separate call as soon as it is finished, in several threads.
            None uses the function's ``per_sample`` attribute. ``timeout_s`` and verl's signature imply it. verl's
            functions run in one thread.
        timeout_s: time limit for one completion, seconds, positive. With a limit, the function runs in worker
            processes, which are killed with all processes that they started. They import the function again, so define
            it at the top level of a file. They see no GPU and none of a launcher's variables. A call whose process
            receives SIGKILL otherwise is repeated once. An ``async`` function stays in the trainer's process and is
            cancelled. Its time starts when the completion is finished and includes waiting in its own queue, so for
            rewards from a server you set ``timeout_s`` of each request in their ``endpoint`` instead. None: no limit.
        on_error: action at a failure. ``raise`` ends the run, ``skip`` leaves the response out of learning and of all
            means (with ``weight: 0``, only this reward), ``zero`` sets the reward to 0.
        max_error_rate: largest fraction of a rollout's completions, in [0, 1], that may fail without ending the run.
        dry_call: whether to call the function on two made-up completions before the run. The first repeats a prompt,
            the second is empty.
    """

    function: str | Callable[..., Any]  # str first: otherwise the configuration cannot be saved
    weight: float = 1.0
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    messages: bool = False
    per_sample: bool | None = None
    timeout_s: float | None = None
    on_error: Literal["raise", "skip", "zero"] = "raise"
    max_error_rate: float = 0.5
    dry_call: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, timeout_s="positive or null", max_error_rate="in [0, 1]")
        if self.timeout_s is not None and self.per_sample is False:
            raise UsageError("timeout_s applies to single completions: remove per_sample: false")
        try:
            self.target  # noqa: B018 (loads the function now, so that a wrong reference is reported early)
        except ValueError as error:
            raise UsageError(f"reward function {self.function!r}: {error}") from error

    # -- the callable and its signature -----------------------------------------------------------------------

    @cached_property
    def _loaded(self) -> Callable[..., Any]:
        return as_function(self.function)

    @cached_property
    def target(self) -> Callable[..., Any]:
        """The function, or an instance of the class that ``function`` refers to."""
        is_class = isinstance(self._loaded, type)
        if is_class or self.arguments:
            signature = inspect.signature(self._loaded)
            try:
                (signature.bind if is_class else signature.bind_partial)(**self.arguments)
            except TypeError as error:
                raise UsageError(f"its arguments do not match its signature: {error}") from error
        return self._loaded(**self.arguments) if is_class else self._loaded

    @cached_property
    def call_arguments(self) -> dict[str, Any]:
        """Configured keyword arguments of every call; empty for a class, whose constructor received them."""
        return {} if isinstance(self._loaded, type) else self.arguments

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Parameters that ``arguments`` do not set."""
        parameters = inspect.signature(self.target).parameters.values()
        return [parameter for parameter in parameters if parameter.name not in self.call_arguments]

    @cached_property
    def convention(self) -> Convention:
        """The library convention that the parameter names match."""
        names = {parameter.name for parameter in self.parameters}
        return next((convention for convention in (VERL, VERL_BATCH, OPENRLHF) if convention.marker in names), OURS)

    @property
    def columns(self) -> set[str]:
        """Names of the columns that parameters have; those of ``**kwargs`` are unknown."""
        return {self.convention.columns.get(parameter.name, parameter.name) for parameter in self.parameters}

    @cached_property
    def required(self) -> list[str]:
        """Names of parameters without a default."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in self.parameters if p.kind not in variadic and p.default is p.empty]

    @cached_property
    def is_async(self) -> bool:
        """Whether the function must be awaited."""
        function = self.target.func if isinstance(self.target, partial) else self.target
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def label(self) -> str:
        """Name in logs."""
        return self.name or str(getattr(self.target, "__name__", type(self.target).__name__))

    # -- how it is executed -----------------------------------------------------------------------------------

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may call the function at the same time."""
        if self.per_sample is None:
            return bool(getattr(self.target, "per_sample", False))
        return self.per_sample

    @property
    def scores_singly(self) -> bool:
        """Whether each completion is scored in a separate call, as soon as it is finished."""
        return self.convention.per_sample or self.timeout_s is not None or self.thread_safe

    @property
    def runs_in_worker(self) -> bool:
        """Whether the function runs in worker processes, which can be killed."""
        return self.timeout_s is not None and not self.is_async

    @property
    def supports_dry_run(self) -> bool:
        """Whether the function may be called before the run."""
        return self.dry_call and bool(getattr(self.target, "dry_call", True))

    @property
    def picklable(self) -> Callable[..., Any] | str:
        """The function as it is sent to worker processes: by reference where possible."""
        function = self.function
        if inspect.isfunction(function) and function.__qualname__.isidentifier():
            return f"{function.__module__}:{function.__qualname__}"
        return function

    # -- a call -----------------------------------------------------------------------------------------------

    def evaluate(self, columns: Mapping[str, Any], indices: Sequence[int]) -> RewardResult:
        """Score completions in this thread; every exception becomes a failure.

        Args:
            columns: lists with one entry for each of these completions, and ``trainer_state``.
            indices: positions of the completions in the rollout, for messages.
        """
        output = RewardOutput([])
        try:
            return self._read(self.target(**self._call_arguments(columns, output)), indices, output)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a function may raise any class
            return RewardFailure.from_error(error)

    async def evaluate_async(self, columns: Mapping[str, Any], indices: Sequence[int]) -> RewardResult:
        """Await an ``async`` function; see :meth:`evaluate`. Its exceptions are raised, except for exits."""
        output = RewardOutput([])
        try:
            return self._read(await self.target(**self._call_arguments(columns, output)), indices, output)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop, which all functions share
            return RewardFailure.from_error(error)

    def _call_arguments(self, columns: Mapping[str, Any], output: RewardOutput) -> dict[str, Any]:
        """Return the keyword arguments of a call: columns under the function's parameter names, and ``arguments``."""
        offered = {
            "trainer_state": TrainerState(),
            **columns,
            "log_metric": output.log,
            "log_extra": output.log_all,
        }
        renamed = self.convention.columns
        if renamed:
            if self.convention is OPENRLHF:
                ends = offered.get("end_tokens") or [""] * len(offered["prompts"])
                texts = zip(offered["prompts"], offered["completions"], ends, strict=True)
                offered["queries"] = [prompt + text + end for prompt, text, end in texts]
            infos = offered.get("extra_info", [None] * len(columns["completions"]))
            offered["extra_info"] = [info or {} for info in infos]  # verl's functions expect a dictionary
            offered = {name: offered[column] for name, column in renamed.items() if column in offered}
        if self.convention.per_sample:
            offered = {name: values[0] for name, values in offered.items()}
        takes_all = not renamed and any(p.kind is p.VAR_KEYWORD for p in self.parameters)
        names = {parameter.name for parameter in self.parameters}
        selected = {name: value for name, value in offered.items() if takes_all or name in names}
        return {**private(selected), **private(self.call_arguments, objects=False)}

    def _read(self, returned: Any, indices: Sequence[int], output: RewardOutput) -> RewardOutput:
        return output.read([returned] if self.convention.per_sample else returned, indices)

    def with_messages(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert prompts and completions to chat messages if the function takes messages.

        Args:
            columns: lists with one entry per completion; ``messages``, the prompts as messages, may be empty. A prompt
                of text becomes a user message, with the images of the column ``images`` as parts.
        """
        converted = {name: values for name, values in columns.items() if name != "messages"}
        if self.messages and self.convention is OURS:
            prompts = converted["prompts"]
            messages = columns.get("messages") or [[]] * len(prompts)
            images = columns.get("images") or [None] * len(prompts)
            converted["prompts"] = [
                conversation or [user_message(text, of_prompt or ())]
                for text, conversation, of_prompt in zip(prompts, messages, images, strict=True)
            ]
            converted["completions"] = columns.get("conversations") or [
                [{"role": "assistant", "content": text}] for text in converted["completions"]
            ]
        return converted

    # -- validation -------------------------------------------------------------------------------------------

    def check(self, columns: Iterable[str]) -> None:
        """Validate the function's parameters before anything is generated.

        Args:
            columns: column names of the data.

        Raises:
            ValueError: a required parameter is not available, or worker processes cannot receive the function.
        """
        columns = list(columns)
        if "images" in columns and not self.messages and getattr(self.target, "reads_images_in_messages", False):
            raise UsageError(
                f"reward function {self.label!r} reads images in messages only, and prompts have images: set messages: "
                f"true"
            )
        renamed = self.convention.columns
        available = [*GENERATED_COLUMNS, *columns]
        generated = [*CALL_ARGUMENTS, *(["queries"] if self.convention is OPENRLHF else [])]
        for parameter in self.required:
            needed = renamed.get(parameter, parameter)
            if needed in (*available, *generated) or parameter == "extra_info":
                continue
            near = get_close_matches(needed, available, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            answers = [column for column in columns if column in _ANSWERS and needed in _ANSWERS]
            if answers and not near:
                hint = f"; the data has {answers[0]!r}: map it with columns: {{{needed}: {answers[0]}}}"
            if renamed:
                hint = f"; it reads the column {needed!r}: map yours with columns: {{{needed}: <yours>}}"
            source = "the data has only" if renamed else "a rollout provides only"
            raise UsageError(f"reward function {self.label!r} needs {parameter!r}, but {source} {available}{hint}")
        if self.runs_in_worker:
            try:
                ForkingPickler.dumps((self.picklable, self.arguments))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(
                    f"reward function {self.label!r} has a timeout_s, so it runs in worker processes, but it cannot be "
                    f"pickled ({error}): define it at the top level of a file and specify it as file.py:name"
                ) from error

    def missing_columns(self, rows: Sequence[Mapping[str, Any]], name: str, positions: Sequence[str]) -> list[str]:
        """Describe required columns that are empty in some rows, for warnings.

        Args:
            rows: columns of each row.
            positions: file and line of each row.

        Returns:
            One message per column.
        """
        messages = []
        present = {column for row in rows for column in row}
        needed = {self.convention.columns.get(parameter, parameter) for parameter in self.required}
        for column in sorted(present & needed):
            empty = [position for row, position in zip(rows, positions, strict=True) if row.get(column) is None]
            if empty:
                messages.append(
                    f"{len(empty)} of {len(rows)} rows of the {name} have no {column!r}, which reward {self.label} "
                    f"needs; the first is {empty[0]}"
                )
        return messages

    def close(self) -> None:
        """Release the function's resources, such as processes, by its ``close`` method if it has one."""
        close = getattr(self.target, "close", None)
        if close is not None:
            close()


def check_rewards(rewards: Sequence[RewardFunction], columns: Iterable[str], further: Sequence[str] = ()) -> None:
    """Validate all reward functions of a run before anything is generated.

    Args:
        rewards: reward functions of the run.
        columns: column names of the data.
        further: names of further generated columns, such as those of conversations.

    Raises:
        ValueError: a name is used twice or is the name of a metric, a required column is missing, or a column of the
            data has the name of a generated column.
    """
    columns = list(columns)
    for label, count in Counter(reward.label for reward in rewards).items():
        if count > 1:
            raise UsageError(f"two reward functions have the name {label!r}: set another name for one of them")
        if "/" in label:
            raise UsageError(f"a reward cannot be called {label!r}: '/' creates folders in loggers that write files")
        if label in _RESERVED_LABELS:
            raise UsageError(f"a reward cannot be called {label!r}, which is the name of a metric: use another name")
    hidden = [column for column in columns if column in (*GENERATED_COLUMNS, *further, *CALL_ARGUMENTS)]
    if rewards and hidden:
        raise UsageError(
            f"the data has a column {hidden[0]!r}, the name of an argument of reward functions: rename it, "
            f"for example columns: {{my_{hidden[0]}: {hidden[0]}}}"
        )
    for reward in rewards:
        reward.check([*columns, *further])
