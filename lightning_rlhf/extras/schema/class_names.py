"""Names of classes that cannot be meant: of another kind, misspelt, or a word that another program has for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning_rlhf.cli.early import suggestion
from lightning_rlhf.cli.merging import REQUIRED
from lightning_rlhf.cli.signatures import Schema, alternatives, classes_of, fits
from lightning_rlhf.extras.schema.known import SCHEDULE, definition, is_class, names, schedules, schema
from lightning_rlhf.extras.schema.used import Used

_CALLBACKS = "lightning.pytorch.callbacks.callback.Callback"
_LOGGERS = "lightning.pytorch.loggers.logger.Logger"
# Classes of Lightning and torch that an option accepts: by its base class, or by the kind of factory that it is.
FOREIGN_CLASSES = {
    _CALLBACKS: """BackboneFinetuning BasePredictionWriter BatchSizeFinder Checkpoint DeviceStatsMonitor EarlyStopping
        GradientAccumulationScheduler LambdaCallback LearningRateFinder LearningRateMonitor ModelCheckpoint ModelPruning
        ModelSummary RichModelSummary RichProgressBar StochasticWeightAveraging Timer TQDMProgressBar
        WeightAveraging""",
    _LOGGERS: "CometLogger CSVLogger MLFlowLogger TensorBoardLogger WandbLogger",
    "optimizer": """ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD
        SparseAdam""",
    "lr_scheduler": """ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR
        LambdaLR LinearLR MultiplicativeLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR
        StepLR""",
}
_FOREIGN_WORDS = {  # of other programs, in small letters
    _LOGGERS: {
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
_FACTORIES = {  # options of a module that take a class and call it later, and the kind of each
    "optimizer": "optimizer", "critic_optimizer": "optimizer",
    "lr_scheduler": "lr_scheduler", "critic_lr_scheduler": "lr_scheduler",
}  # fmt: skip


class _Named(NamedTuple):
    """The name of a class in a configuration, at the place of an option.

    Args:
        key: dotted key of the option.
        name: what stands there.
        option: node of the option.
        bases: base classes that the option accepts; none if it is a factory.
        factory: kind of factory that the option is; empty if it is none.
    """

    key: str
    name: str
    option: Schema
    bases: list[str]
    factory: str = ""

    @property
    def kinds(self) -> list[str]:
        """Keys of what the option accepts in :data:`FOREIGN_CLASSES`."""
        return [self.factory] if self.factory else self.bases


def wrong_names(used: Used) -> Iterator[tuple[str, str]]:
    """Yield a message for each name of a class among the arguments of a class that cannot be meant, and that name."""
    for named in _names(used):
        if message := _mistake(named):
            yield f"{named.key}{message}", named.name


def wrong_section(section: str, value: Any) -> str:
    """Return a message about the class of a section, ``model`` or ``data``, that is of another kind; else ''."""
    name = value.get("class_path") if isinstance(value, dict) else value
    if section not in REQUIRED or not isinstance(name, str):
        return ""
    option = schema()["properties"][section]
    return _other_kind(_Named(section, name, option, classes_of(option)))


def _names(used: Used) -> Iterator[_Named]:
    for argument, value in used.arguments.items():
        option, key = used.options.get(argument, {}), f"{used.key}.{argument}"
        factory = _FACTORIES.get(argument, "") if used.key == "model" else ""
        bases = [] if factory else _accepted(option)
        for entry in value if isinstance(value, list) else [value]:
            name = entry.get("class_path") if isinstance(entry, dict) else entry
            if isinstance(name, str) and (factory or bases):
                yield _Named(key, name, option, bases, factory)


def _accepted(option: Schema) -> list[str]:
    inner = [node["items"] for node in alternatives(option) if isinstance(node.get("items"), dict)]
    return [*classes_of(option), *(path for node in inner for path in classes_of(node))]


def _mistake(named: _Named) -> str:
    """Return the end of a message; empty if the name may be right."""
    if _takes_any_text(named.option):
        return _nearly_a_class(named)
    if _REWARD in named.bases and ":" in named.name:
        return f" must have {{function: ...}} for each reward: write {{function: {named.name}}}"
    if is_class(definition(named.name)):
        return _other_kind(named)
    if not named.name.isidentifier():
        return ""  # a function or a class of a user
    unknown = f": no class has the name {named.name!r}"
    if meant := _of_another_program(named):
        return f"{unknown}: {meant}"
    choices = [choice for node in alternatives(named.option) for choice in node.get("enum", ())]
    foreign = [name for kind in named.kinds for name in FOREIGN_CLASSES.get(kind, "").split()]
    if named.name in (*choices, *foreign) or _fits_another_type(named):
        return ""
    near = suggestion(named.name, [*choices, *_ours(named.bases), *foreign])
    return f"{unknown}{near}" if near else ""


def _takes_any_text(option: Schema) -> bool:
    return any(node.get("type") == "string" and "pattern" not in node for node in alternatives(option))


def _nearly_a_class(named: _Named) -> str:
    """Return the end of a message about a word like a class where any text may stand, such as PPOLos for PPOLoss."""
    is_word = named.name.isidentifier() and named.name[0].isupper() and definition(named.name) is None
    near = suggestion(named.name, _ours(named.bases)) if is_word else ""
    return f": no class has the name {named.name!r}{near}" if near else ""


def _of_another_program(named: _Named) -> str:
    """Return what to write for a word such as ``wandb`` or ``cosine``; empty for any other."""
    word = named.name.lower()
    if named.factory == "lr_scheduler" and word in schedules():
        return f"write {{class_path: {SCHEDULE}, init_args: {{kind: {word}}}}}"
    if named.factory == "lr_scheduler" and word == "constant":
        return "null keeps the rate"
    paths = [_FOREIGN_WORDS[kind][word] for kind in named.kinds if word in _FOREIGN_WORDS.get(kind, {})]
    return f"write {{class_path: {paths[0]}}}" if paths else ""


def _fits_another_type(named: _Named) -> bool:
    """Return whether a name is a value of another type that the option has, such as true."""
    others = [node for node in alternatives(named.option) if "type" in node and not classes_of(node)]
    return any(fits(named.name, node) for node in others)


def _other_kind(named: _Named) -> str:
    entry = definition(named.name)
    if entry is None or not is_class(entry) or named.factory or not set(named.bases).isdisjoint(entry["x-bases"]):
        return ""
    bases = " or ".join(base.rpartition(".")[2] for base in named.bases)
    ours = _ours(named.bases)
    near = next((f"; did you mean {name!r}?" for name in ours if name in _alike(entry["title"])), "")
    near = near or suggestion(entry["title"], ours)
    article = "an" if bases[0] in "AEIOU" else "a"
    return f": {entry['title']} is not {article} {bases}{near}"


def _alike(title: str) -> tuple[str, ...]:
    """Return names of classes that belong to another one, as GRPOModule to GRPO."""
    stem = title.removesuffix("Loss").removesuffix("Module")
    return (f"{stem}Module", f"{stem}Loss", stem)


def _ours(bases: list[str]) -> list[str]:
    """Return the short names of this package's classes with one of these base classes."""
    found = []
    for path in names():
        entry = definition(path)
        if entry is not None and not set(bases).isdisjoint(entry.get("x-bases", ())):
            found.append(path.rpartition(".")[2])
    return list(dict.fromkeys(found))
