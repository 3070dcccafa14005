"""Data of pages in the format of lightning_rlhf.extras.report.page and project."""

import time


def table(**columns):
    """Return the columns of a table of metrics; ``a__b`` is the metric ``a/b``."""
    return {name.replace("__", "/"): values for name, values in columns.items()}


def run(name="a", **changes):
    """Return the data of a finished run with the given parts replaced."""
    return {
        "name": name,
        "path": f"runs/{name}",
        "state": "ended",
        "error": "",
        "modified": 0,
        "training": table(step=[1, 2, 3], reward__mean=[0.1, 0.2, 0.4]),
        "validation": {"step": []},
        "findings": [],
        "checks": [],
        "config": {},
        "environment": {},
        "rewards": [],
        "groups": [],
        "samples": [],
        "validations": [],
        "answers": [],
        **changes,
    }


def page(*runs, definitions=None):
    return {"runs": list(runs), "definitions": definitions or {}}


def response(**changes):
    return {"prompt": "question", "response": "answer", "ground_truth": "", "reward": 1.0, "rewards": {}, **changes}


def with_responses(*rows, **changes):
    """Return the data of a page of one run with these responses."""
    return page(run(samples=[{"step": 1, "rows": list(rows)}], **changes))


def project(*runs, definitions=None):
    """Return the data of the table of runs."""
    whole = [
        {"name": f"run{i}", "state": "ended", "error": "", "steps": 10, "limit": 10, "modified": time.time() - 3600,
         "seed": i, "config": {}, "first": {}, "last": {}, "failed_checks": 0, "link": "", "group": i, **run}
        for i, run in enumerate(runs)
    ]  # fmt: skip
    return {"project": {"path": "runs", "runs": whole}, "definitions": definitions or {}}
