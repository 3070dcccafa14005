"""Wrong names of classes: of another kind, misspelt, or a word that another program has for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning_rlhf.cli.early import suggestion
from lightning_rlhf.cli.merging import REQUIRED
from lightning_rlhf.cli.signatures import Schema, alternatives, classes_of, fits
from lightning_rlhf.extras.schema.known import SCHEDULE, definition, is_class, names, schedules, schema
from lightning_rlhf.extras.schema.used import Used

_CALLBACK = "lightning.pytorch.callbacks.callback.Callback"
_LOGGER = "lightning.pytorch.loggers.logger.Logger"
# Options of a module such as ``optimizer`` take a factory. The schema cannot describe it, so they are known by name.
_FACTORIES = {
    "optimizer": "optimizer", "critic_optimizer": "optimizer",
    "lr_scheduler": "lr_scheduler", "critic_lr_scheduler": "lr_scheduler",
}  # fmt: skip
_OWN_FACTORIES = {
    "optimizer": ["MatrixDecayAdamW", "MuonAdamW"],
    "lr_scheduler": ["RunSchedule"],
}  # classes of this package for them
# The keys of this table and the next are the full name of a base class, or the kind of a factory. The classes of
# Lightning and torch are written down because importing them takes seconds.
LIBRARY_CLASSES = {
    _CALLBACK: """BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Checkpoint DeviceStatsMonitor
        EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder
        LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar
        RichModelSummary RichProgressBar SpikeDetection StochasticWeightAveraging ThroughputMonitor Timer
        TQDMProgressBar WeightAveraging""",
    _LOGGER: "CometLogger CSVLogger MLFlowLogger TensorBoardLogger WandbLogger",
    "optimizer": """ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD
        SparseAdam""",
    "lr_scheduler": """ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR
        LambdaLR LinearLR MultiplicativeLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR
        StepLR""",
}
_WORDS_OF_OTHERS = {  # what other programs call a class, in small letters
    _LOGGER: {
        "wandb": "lightning.pytorch.loggers.WandbLogger", "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
        "comet": "lightning.pytorch.loggers.CometLogger", "csv": "lightning.pytorch.loggers.CSVLogger",
        "tensorboard": "lightning.pytorch.loggers.TensorBoardLogger",
        "trackio": "lightning_rlhf.extras.loggers.trackio.TrackioLogger",
    },
    "optimizer": {
        "adamw_8bit": "bitsandbytes.optim.AdamW8bit", "adamw8bit": "bitsandbytes.optim.AdamW8bit",
        "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit", "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
        "adam8bit": "bitsandbytes.optim.Adam8bit", "adamw_torch": "AdamW", "muonadamw": "MuonAdamW",
    },
}  # fmt: skip
_REWARD = "lightning_rlhf.rewards.function.RewardFunction"


class _Mention(NamedTuple):
    """The name of a class in a configuration, at the place of an option.

    Args:
        key: dotted key of the option.
        name: what stands there.
        option: node of the option.
        bases: full names of the base classes that the option accepts; none for a factory.
        factory: ``optimizer`` or ``lr_scheduler``; empty for an option that is no factory.
    """

    key: str
    name: str
    option: Schema
    bases: list[str]
    factory: str = ""

    @property
    def kinds(self) -> list[str]:
        """What the option accepts, as keys of the tables."""
        return [self.factory] if self.factory else self.bases

    @property
    def ours(self) -> list[str]:
        """Short names of this package's classes that the option accepts."""
        if self.factory:
            return _OWN_FACTORIES[self.factory]
        found = []
        for path in names():
            entry = definition(path)
            if entry is not None and is_class(entry) and not set(self.bases).isdisjoint(entry["x-bases"]):
                found.append(path.rpartition(".")[2])
        return list(dict.fromkeys(found))


def wrong_names(used: Used) -> Iterator[tuple[str, str]]:
    """Yield (message, name) for each wrong name of a class among the arguments of a class."""
    for mention in _mentions(used):
        if message := _mistake(mention):
            yield f"{mention.key}{message}", mention.name


def wrong_section(section: str, value: Any) -> str:
    """Return a message about the class of a section, ``model`` or ``data``, that is of another kind; else ''."""
    name = value.get("class_path") if isinstance(value, dict) else value
    if section not in REQUIRED or not isinstance(name, str):
        return ""
    option = schema()["properties"][section]
    return _other_kind(_Mention(section, name, option, classes_of(option)))


def _mentions(used: Used) -> Iterator[_Mention]:
    """Yield the names that stand where a class may: alone, in a list, or as a value of a mapping."""
    for argument, value in used.arguments.items():
        option, key = used.options.get(argument, {}), f"{used.key}.{argument}"
        factory = _FACTORIES.get(argument, "") if used.key == "model" and used.entry is not None else ""
        entries, accepting = _entries(value, option)
        bases = [] if factory else [path for node in accepting for path in classes_of(node)]
        for entry in entries:
            name = entry.get("class_path") if isinstance(entry, dict) else entry
            if isinstance(name, str) and (factory or bases):
                yield _Mention(key, name, option, bases, factory)


def _entries(value: Any, option: Schema) -> tuple[list[Any], list[Schema]]:
    """Return what may be classes in the value of an option, and the nodes that say which.

    In ``A``, ``[A, B]`` and ``{x: A}`` these are A and B. A single value may stand for a list of it.
    """
    nodes = alternatives(option)
    of_items = [node["items"] for node in nodes if isinstance(node.get("items"), dict)]
    of_values = [node["additionalProperties"] for node in nodes if isinstance(node.get("additionalProperties"), dict)]
    if isinstance(value, dict) and "class_path" not in value and of_values:
        return list(value.values()), of_values
    return value if isinstance(value, list) else [value], [option, *of_items]


def _mistake(mention: _Mention) -> str:
    """Return the end of a message; empty if the name may be right. Each check assumes that none above applied."""
    if _REWARD in mention.bases and ":" in mention.name:
        return f" must have {{function: ...}} for each reward: write {{function: {mention.name}}}"
    if _takes_any_text(mention.option):
        if "." in mention.name:
            return ""  # perhaps a class that only behaves like the base class
        return _nearly_a_class(mention) or _other_kind(mention)
    if is_class(definition(mention.name)):
        return _other_kind(mention)
    if not mention.name.isidentifier():
        return ""  # a function or a class of a user

    # A word, which no class of this package has as its name.
    unknown = f": no class has the name {mention.name!r}"
    if meant := _of_another_program(mention):
        return f"{unknown}: {meant}"
    choices = [choice for node in alternatives(mention.option) for choice in node.get("enum", ())]
    of_libraries = [name for kind in mention.kinds for name in LIBRARY_CLASSES.get(kind, "").split()]
    if mention.name in (*choices, *of_libraries) or _fits_another_type(mention):
        return ""
    near = suggestion(mention.name, [*choices, *mention.ours, *of_libraries])
    return f"{unknown}{near}" if near else ""


def _takes_any_text(option: Schema) -> bool:
    return any(node.get("type") == "string" and "pattern" not in node for node in alternatives(option))


def _nearly_a_class(mention: _Mention) -> str:
    """Return the end of a message about a word like a class where any text may stand, such as PPOLos for PPOLoss."""
    is_word = mention.name.isidentifier() and mention.name[0].isupper() and definition(mention.name) is None
    near = suggestion(mention.name, mention.ours) if is_word else ""
    return f": no class has the name {mention.name!r}{near}" if near else ""


def _of_another_program(mention: _Mention) -> str:
    """Return what to write for a word such as ``wandb`` or ``cosine``; empty for any other."""
    word = mention.name.lower()
    if mention.factory == "lr_scheduler" and word in schedules():
        return f"write {{class_path: {SCHEDULE}, init_args: {{kind: {word}}}}}"
    if mention.factory == "lr_scheduler" and word == "constant":
        return "null keeps the rate"
    paths = [_WORDS_OF_OTHERS[kind][word] for kind in mention.kinds if word in _WORDS_OF_OTHERS.get(kind, {})]
    return f"write {{class_path: {paths[0]}}}" if paths else ""


def _fits_another_type(mention: _Mention) -> bool:
    """Return whether a name is a value of another type that the option has, such as true."""
    others = [node for node in alternatives(mention.option) if "type" in node and not classes_of(node)]
    return any(fits(mention.name, node) for node in others)


def _other_kind(mention: _Mention) -> str:
    """Return the end of a message about a class of this package that the option does not accept; else ''."""
    entry = definition(mention.name)
    if entry is None or not is_class(entry):
        return ""
    title = entry["title"]
    if title in mention.ours or not set(mention.bases).isdisjoint(entry["x-bases"]):  # a factory has no bases
        return ""
    expected = mention.factory or " or ".join(base.rpartition(".")[2] for base in mention.bases)
    ours = mention.ours
    near = next((f"; did you mean {name!r}?" for name in _confused_with(title) if name in ours), "")
    article = "an" if expected[0] in "AEIOUaeiou" else "a"
    return f": {title} is not {article} {expected}{near or suggestion(title, ours)}"


def _confused_with(title: str) -> tuple[str, ...]:
    """Return the names that users take for each other, as GRPO, GRPOModule and GRPOLoss."""
    stem = title.removesuffix("Loss").removesuffix("Module")
    return (f"{stem}Module", f"{stem}Loss", stem)
