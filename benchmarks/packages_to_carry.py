"""List the packages that a machine without network lacks for this project without extras.

On the machine:

    python -m pip list --format=freeze > installed.txt

Where there is a network, in a repository after ``make install``, with the machine's version of Python:

    .venv/bin/python -m benchmarks.packages_to_carry installed.txt --python 3.12 > carried.txt
    python -m pip download --no-deps --dest wheels --python-version 3.12 --only-binary=:all: -r carried.txt

On the machine, in a copy of the repository with ``wheels`` and ``carried.txt``:

    python -m pip install --no-index --no-deps --find-links wheels --target packages -r carried.txt
    export PYTHONPATH=$PWD/packages
    python -m benchmarks.gpu_acceptance --seconds 570 --points 1 2 13 3 5
    python -m benchmarks.gpu_acceptance --seconds 570 --points 15 17 7 8 14 16
    python -m benchmarks.gpu_acceptance --seconds 570 --points 4 6 9 10 18 19
    python -m benchmarks.gpu_acceptance --seconds 570 --points 11 12

Some machines limit how long a command may run. So each of the last four ends within ten minutes, and lists the points
that it had no time for.

The versions are those installed here. torch must be on the machine, because its packages are too large to carry.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lightning_rlhf.extras.doctor.command import requirements

_TOO_LARGE = ("torch",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the packages, one in each line; exit code 2 if the machine lacks torch or has one that is too old."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages_to_carry", description=__doc__.splitlines()[0])
    parser.add_argument("installed", type=Path, help="output of pip list --format=freeze on the machine")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(*missing(options.installed.read_text(encoding="utf-8"), options.python), sep="\n")
    except ValueError as error:
        print(f"packages_to_carry: {error}", file=sys.stderr)
        return 2
    return 0


def missing(installed: str, python: str) -> list[str]:
    """Return the packages to carry, each with the version that is installed here.

    Args:
        installed: lines ``name==version`` of the packages on the machine.
        python: version of Python on the machine, such as 3.12.

    Raises:
        ValueError: torch is missing on the machine or too old.
    """
    pairs = [line.partition("==")[::2] for line in installed.split() if "==" in line]
    present = {canonicalize_name(name): Version(version) for name, version in pairs}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    carried: dict[str, str] = {}
    waiting = [requirement for extra, requirement in requirements()[1] if not extra]
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if name in present and requirement.specifier.contains(present[name], prereleases=True):
            continue
        if name in _TOO_LARGE:
            raise ValueError(f"the machine needs {requirement}, it has {present.get(name, 'none')}: use another image")
        if name not in carried:
            carried[name] = metadata.version(name)
            waiting += _needs(name, requirement)
    return sorted(f"{name}=={version}" for name, version in carried.items())


def _needs(name: str, requirement: Requirement) -> list[Requirement]:
    """Return the requirements of a package, with those of the extras that a requirement names."""
    listed = []
    for needed in map(Requirement, metadata.requires(name) or ()):
        extras = [extra for extra in requirement.extras if needed.marker is not None]
        if any(needed.marker.evaluate({"extra": extra}) for extra in extras if needed.marker is not None):
            needed.marker = None
        listed.append(needed)
    return listed


if __name__ == "__main__":
    sys.exit(main())
