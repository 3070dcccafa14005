"""A class in a configuration is the class in Python: with its own defaults in place of any object."""

import dataclasses
import inspect
import pkgutil
import types
import typing
from importlib import import_module

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

import lightning_rlhf
from lightning_rlhf import objectives
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.extras import algorithms
from lightning_rlhf.extras.commands.run_config import parse_run_config
from lightning_rlhf.modules.role_module import RoleModule

LOSSES = "lightning_rlhf.extras.algorithms.preference_losses"
KLTERM = "lightning_rlhf.objectives.kl_controllers.KLTerm"
OPTIMIZERS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad]
MODULES = [
    kind for name in lightning_rlhf.__all__ if inspect.isclass(kind := getattr(lightning_rlhf, name))
    and issubclass(kind, RoleModule) and not inspect.isabstract(kind)
]  # fmt: skip
OWNERS = [*MODULES, RolloutLoop]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, about Lightning
QUICK = ("DPOModule", "GSPOModule")  # both found the fault: each has a default object unlike those of other classes


def owned_classes():
    """Return the classes of this package that can be made without arguments."""
    kinds = set()
    extra = pkgutil.iter_modules(algorithms.__path__, "lightning_rlhf.extras.algorithms.")
    losses = [module for module in extra if module.name.endswith("_losses")]
    for module in [*pkgutil.iter_modules(objectives.__path__, "lightning_rlhf.objectives."), *losses]:
        kinds |= {kind for kind in vars(import_module(module.name)).values() if inspect.isclass(kind)}
    return sorted((kind for kind in kinds if is_made_without_arguments(kind)), key=lambda kind: kind.__qualname__)


def is_made_without_arguments(kind):
    try:
        kind()
    except Exception:
        return False
    return kind.__module__.startswith("lightning_rlhf.") and not kind.__name__.startswith("_")


def options_of(owner):
    """Yield (option, base class) of the options of a class that have a default object."""
    hints = typing.get_type_hints(owner.__init__)
    for name, parameter in inspect.signature(owner).parameters.items():
        options = [hints.get(name), *typing.get_args(hints.get(name))]
        bases = [
            option for option in options if inspect.isclass(option) and option.__module__.startswith("lightning_rlhf")
        ]
        if bases and parameter.default not in (None, inspect.Parameter.empty):
            yield name, bases


def cases():
    """Yield (owner, classes by option): over all cases of an owner, each option has each class that it accepts."""
    kinds = owned_classes()
    for owner in OWNERS:
        accepted = {
            option: [kind for kind in kinds if any(issubclass(kind, base) for base in bases if is_class(base))]
            for option, bases in options_of(owner)
        }
        accepted = {option: fitting for option, fitting in accepted.items() if fitting}
        for turn in range(max(map(len, accepted.values()), default=0)):
            yield owner, {option: fitting[turn % len(fitting)] for option, fitting in accepted.items()}


def is_class(base):
    return inspect.isclass(base) and not getattr(base, "_is_protocol", False)


def parsed(tmp_path, owner, **options):
    """Return the options of a module or callback after the command line has read them from a file."""
    spec = {"class_path": f"{owner.__module__}.{owner.__qualname__}", "init_args": options}
    config = {
        "model": {"class_path": "lightning_rlhf.GRPOModule", "init_args": {"actor": "a"}},
        "data": {"class_path": "lightning_rlhf.PromptDataModule", "init_args": {"train": "t.jsonl", "tokenizer": "a"}},
        "trainer": {"max_steps": 1},
    }
    if issubclass(owner, RoleModule):
        required = [
            name for name, each in inspect.signature(owner).parameters.items()
            if each.default is each.empty and name not in options and each.kind is not each.VAR_KEYWORD
        ]  # fmt: skip
        config["model"] = spec | {"init_args": {name: {} if name == "mixture" else "a" for name in required} | options}
    else:
        config["trainer"]["callbacks"] = [spec]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    result = parse_run_config(["--config", str(tmp_path / "run.yaml")])
    return (result["model"] if issubclass(owner, RoleModule) else result["trainer"]["callbacks"][0])["init_args"]


def built(value, base):
    """Return the object that the parser makes of a parsed value."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=base)
    return parser.instantiate_classes(Namespace(x=value))["x"]


def fields(value):
    """Return all fields of an object as plain values."""
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("lightning_rlhf"):
        names = vars(value) if hasattr(value, "__dict__") else [field.name for field in dataclasses.fields(value)]
        return {"class": type(value), **{name: fields(getattr(value, name)) for name in names}}
    if isinstance(value, list | tuple):
        return [fields(entry) for entry in value]
    if isinstance(value, types.MethodType | types.FunctionType):
        return getattr(value, "__qualname__", repr(value))
    return value


ALL = list(cases())


def path_of(kind):
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}"}


@pytest.mark.parametrize(
    ("owner", "kinds"),
    [pytest.param(*case, marks=() if case[0].__name__ in QUICK else pytest.mark.slow) for case in ALL],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(kind.__name__ for kind in value.values()),
)
def test_class_has_its_own_defaults_in_place_of_any_default_object(tmp_path, owner, kinds):
    values = parsed(tmp_path, owner, **{option: path_of(kind) for option, kind in kinds.items()})
    for option, kind in kinds.items():
        assert fields(built(values[option], kind)) == fields(kind())


def test_cases_cover_the_losses_and_estimators_of_all_modules():
    assert len({owner for owner, _ in ALL}) > 20
    options = {option for _, kinds in ALL for option in kinds}
    assert options >= {"loss", "policy_loss", "advantages", "kl_loss", "aggregation"}


@pytest.mark.slow
@pytest.mark.parametrize("owner", MODULES, ids=lambda owner: owner.__name__)
def test_optimizer_by_name_has_what_torch_gives_it(tmp_path, owner):
    names = [name for name in inspect.signature(owner).parameters if name.endswith("optimizer")]
    for kind in OPTIMIZERS:
        spec = {"class_path": f"torch.optim.{kind.__name__}", "init_args": {"lr": 0.25}}
        values = parsed(tmp_path, owner, **dict.fromkeys(names, spec))
        weights = [torch.zeros(2, requires_grad=True)]
        for name in names:
            assert kind(weights, **vars(values[name]["init_args"])).defaults == kind(weights, lr=0.25).defaults


def test_optimizer_by_name_needs_its_rate(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parsed(tmp_path, lightning_rlhf.SFTModule, optimizer={"class_path": "torch.optim.SGD"})
    assert "model.optimizer (SGD): lr is missing" in capsys.readouterr().err


def test_options_without_a_class_change_the_object_of_the_module(tmp_path):
    values = parsed(
        tmp_path,
        lightning_rlhf.RLOOModule,
        kl_reward={"estimator": "k3"},
        kl_loss={"coef": 0.01},
        optimizer={"lr": 0.5},
    )
    assert (values["kl_reward"]["coef"], values["kl_reward"]["estimator"]) == (0.05, "k3")
    assert (values["kl_loss"]["coef"], values["kl_loss"]["estimator"]) == (0.01, "k3")
    optimizer = values["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["weight_decay"]) == ("torch.optim.AdamW", 0.01)


OWN_MODULE = """
import dataclasses
from lightning_rlhf import DPOModule
from lightning_rlhf.extras.algorithms.preference_losses import SimPOLoss

@dataclasses.dataclass(frozen=True)
class MyLoss(SimPOLoss):
    margin: float = 3.0
    other: float = 7.0

class MyModule(DPOModule):
    def __init__(self, actor, loss: SimPOLoss = MyLoss(beta=9.0, other=8.0)):
        super().__init__(actor, loss=loss)
"""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (None, {"beta": 9.0, "margin": 3.0, "other": 8.0}),
        ({"margin": 1.5}, {"beta": 9.0, "margin": 1.5, "other": 8.0}),
        ({"class_path": "own_losses.MyLoss"}, {"beta": 2.0, "margin": 3.0, "other": 7.0}),
        ({"class_path": "own_losses.MyLoss", "init_args": {"other": 1.0}}, {"beta": 2.0, "margin": 3.0, "other": 1.0}),
        ({"class_path": f"{LOSSES}.SimPOLoss"}, {"beta": 2.0, "margin": 1.0}),
    ],
    ids=str,
)
def test_classes_of_users_follow_the_same_rule(tmp_path, monkeypatch, loss, expected):
    (tmp_path / "own_losses.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    owner = import_module("own_losses").MyModule
    values = parsed(tmp_path, owner, **({} if loss is None else {"loss": loss}))["loss"]["init_args"]
    assert {name: values[name] for name in expected} == expected
