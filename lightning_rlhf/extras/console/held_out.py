"""Validation metrics as people read them: with intervals, each number once, before and after training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_rlhf.extras.records.val_metrics import CHANGE, shown_names, with_interval

_FEW = 0.05  # mean reward in [0, 1] with which most groups have no reward
_NEARLY_ALL = 0.95  # mean reward in [0, 1] that leaves little to learn
_CUT = 0.5  # fraction of cut responses with which the length limit comes first
_REMEDY = (
    "The first remedy is an example of each kind in the prompts, if they have none; others are on the documentation's "
    "page 'Prompts for a small model'"
)
_LOSSES = ("val/loss", "val/pair_accuracy", "val/accuracy")


def before_and_after(
    rows: Sequence[Mapping[str, str]], further: Collection[str] = ()
) -> tuple[str, str, list[tuple[str, str, str, str]]] | None:
    """Return the first and the last validation of a run; None if it has fewer than two.

    Args:
        rows: rows of ``metrics.csv``.
        further: names of further metrics.

    Returns:
        The steps of both, and (metric, value before, value after, change) for the means of greedy and sampled
        responses, the loss, the accuracies and the further metrics, those with an interval first, then the fraction of
        correct responses of each source. The change is that of the same prompts; empty where it is not logged.
    """
    validations = [row for row in rows if any(name.startswith("val/") and value for name, value in row.items())]
    if len(validations) < 2:
        return None
    first, last = (
        {name: float(value) for name, value in row.items() if name.startswith("val/") and value}
        for row in (validations[0], validations[-1])
    )
    shown = {*shown_names(first), *shown_names(last)}  # two rewards may have the same values in one of them
    names = [name for name in last if name in shown and name in first and name.count("/") == 1]
    names = [name for name in names if name.endswith(("_greedy", "_sampled")) or name in {*_LOSSES, *further}]
    names.sort(key=lambda name: f"{name}_low" not in last)
    names += [name for name in last if _is_correctness_of_source(name) and name in first]
    compared = []
    for name in names:
        change = with_interval(f"{name}{CHANGE}", last) if f"{name}{CHANGE}" in last else ""
        compared.append((name, with_interval(name, first), with_interval(name, last), change))
    return validations[0]["step"], validations[-1]["step"], compared


def unchanged_kinds(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence about the sources whose responses did not get better although those to all prompts did.

    Args:
        rows: rows of ``metrics.csv``.
    """
    validations = [row for row in rows if any(name.startswith("val/") and value for name, value in row.items())]
    if len(validations) < 2:
        return ""
    low = {
        name.removesuffix("_change_low"): float(value)
        for name, value in validations[-1].items()
        if value and name.endswith("_change_low") and "/fraction_correct_" in name
    }
    kinds = [name for name in low if name.count("/") == 2]
    if not any(bound > 0 for name, bound in low.items() if name not in kinds):
        return ""
    better = {name.split("/")[1] for name in kinds if low[name] > 0}
    same = sorted({name.split("/")[1] for name in kinds} - better)
    if not same:
        return ""
    return f"not better than before training, by their 95 % intervals: {', '.join(same)}"


def whether_to_continue(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence about the use of more steps, after a run; empty if it is unknown.

    Compares the last validation with the last one in the first half of the run, but after the first step, as
    docs/hyperparameters.md explains: by more than a quarter of the width of an interval, about a standard error.

    Args:
        rows: rows of ``metrics.csv``.
    """
    validations = [row for row in rows if any(name.startswith("val/") and value for name, value in row.items())]
    steps = [int(row["step"]) for row in validations]
    end = max((int(row["step"]) for row in rows), default=0)
    halves = [index for index, step in enumerate(steps) if 0 < step <= end / 2]
    if not halves or steps[-1] <= end / 2:
        return ""
    then, last = (
        {name: float(value) for name, value in row.items() if name.startswith("val/fraction_correct_") and value}
        for row in (validations[halves[-1]], validations[-1])
    )
    means = ("val/fraction_correct_greedy", "val/fraction_correct_sampled")
    known = [name for name in means if name in then and f"{name}_low" in last and f"{name}_high" in last]
    better = [name for name in known if last[name] - then[name] > (last[f"{name}_high"] - last[f"{name}_low"]) / 4]
    if not known:
        return ""
    if last[known[-1]] > _NEARLY_ALL:  # the sampled fraction, where it was measured
        return f"{last[known[-1]]:.3f} of the responses are correct: little is left for more steps"
    changes = [(last.get(f"{name}_change_low"), last.get(f"{name}_change_high")) for name in known]
    if all(low is not None and high is not None and low <= 0 <= high for low, high in changes):
        return (
            "no change since the start that could not be chance (its 95 % intervals contain 0): read ten responses, "
            "and see the documentation's page 'My run does not learn'"
        )
    if not better:
        return (
            f"not better than at step {steps[halves[-1]]} by more than a standard error: more steps may not help; the "
            f"page Hyperparameters, Length of a run, has the rules"
        )
    return (
        f"still better than at step {steps[halves[-1]]} by more than a standard error: more steps may help, such as "
        f"--trainer.max_steps {2 * end} --ckpt_path last"
    )


def left_to_learn(metrics: Mapping[str, float], most_frequent: tuple[str, float] | None = None) -> str:
    """Return a sentence about the room for learning after the validation before training; empty if it is unknown.

    Args:
        metrics: metrics of the validation; the fraction of correct responses is read, else the only reward in [0, 1].
        most_frequent: most frequent correct answer and its fraction of the prompts; None if it is unknown.
    """
    sampled_means = [name.removesuffix("_sampled") for name in shown_names(metrics) if name.endswith("_sampled")]
    names = [name for name in sampled_means if name.count("/") == 1]  # the others are of sources
    if "val/fraction_correct" in names:
        measure = "val/fraction_correct"
    elif len(names) == 1:
        measure = names[0]
    else:
        return ""
    if f"{measure}_greedy" not in metrics:
        return ""
    greedy, sampled = (metrics[f"{measure}_{kind}"] for kind in ("greedy", "sampled"))
    if not (0 <= greedy <= 1 and 0 <= sampled <= 1):
        return ""
    shares = f"before training, {measure} is {greedy:.3f} for greedy responses and {sampled:.3f} for sampled ones"
    others = [name for name in names if metrics[f"{name}_sampled"] > sampled]
    if sampled < _FEW and greedy < _NEARLY_ALL - 0.1 and others:
        parts = ", ".join(f"{name} ({metrics[f'{name}_sampled']:.3f} for sampled responses)" for name in others)
        return f"{shares}, but {parts} has values to learn from"
    if sampled == greedy == 0:
        return f"{shares}: where no response has a reward, there is nothing to learn from. {_remedy(metrics)}"
    if sampled > _NEARLY_ALL:
        return f"{shares}: little is left to learn"
    if most_frequent is not None and most_frequent[1] >= _FEW and max(greedy, sampled) <= most_frequent[1]:
        answer, fraction = most_frequent
        return (
            f"{shares}: a model that always answers {answer!r} is correct for {fraction:.3f}, so that these may be "
            f"guesses. {_remedy(metrics)}"
        )
    if greedy > _NEARLY_ALL or greedy > max(_NEARLY_ALL - 0.1, 2 * sampled):
        return f"{shares}: the most likely answers are right already; training will make the sampled ones right, too"
    if sampled == 0 or metrics.get(f"{measure}_sampled_high", sampled) < _FEW:
        return f"{shares}: few responses have a reward, so that learning begins slowly. {_remedy(metrics)}"
    rare = {
        name.split("/")[1]: metrics[f"{name}_sampled"]
        for name in sampled_means
        if name not in names and name.endswith(f"/{measure.removeprefix('val/')}") and metrics[f"{name}_sampled"] < _FEW
    }
    if rare:
        kinds = ", ".join(f"{source} ({value:.3f} for sampled responses)" for source, value in rare.items())
        return (
            f"{shares}: there is something to learn, but little from {kinds}, where few responses have a reward. "
            f"{_remedy(metrics)}"
        )
    return f"{shares}: there is something to learn, if this is more than guessing"


def _remedy(metrics: Mapping[str, float]) -> str:
    """Return a sentence about what to do first where responses have no reward."""
    cut = {
        name.rpartition("/")[0].removeprefix("val").strip("/") or "all prompts": value
        for name, value in metrics.items()
        if name.endswith("/truncated_fraction") and value > _CUT
    }
    if not cut:
        return _REMEDY
    kinds = ", ".join(f"{value:.0%} of the responses to {name}" for name, value in cut.items())
    return (
        f"max_response_tokens cut {kinds}: raise it first if correct answers are longer, else show the model where "
        "answers end, by examples in the prompts"
    )


def _is_correctness_of_source(name: str) -> bool:
    """Return whether a metric is the fraction of correct responses of one source."""
    return name.count("/") == 2 and name.endswith(("/fraction_correct_greedy", "/fraction_correct_sampled"))
