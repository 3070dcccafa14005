"""Lists of the interfaces in use: a line for each place in vLLM, route of its server and environment variable."""

from pathlib import Path

from tests.vllm_interfaces.sources import Sources
from tests.vllm_interfaces.uses import IMPLEMENTED, routes, uses, variables

FOLDER = Path(__file__).parent / "versions"


def lines(sources: Sources) -> list[str]:
    """Return what of the interfaces in use a version of vLLM has."""
    places = {place for use in uses() for place in use.alternatives}
    found = [line for place in sorted(places) if (line := sources.line(place)) is not None]
    found += [f"{route} {sources.routes[route]}" for route in routes() if route in sources.routes]
    found += [name for name in variables() if name in sources.environment]
    for place in sorted(set(IMPLEMENTED.values())):
        for method, must in sources.methods(place).items():
            found.append(f"{'must define' if must else 'may define'} {sources.line(f'{place}.{method}')}")
    return found


def write(sources: Sources) -> Path:
    """Write the list of a version; return its file."""
    path = FOLDER / f"{sources.version}.txt"
    path.write_text("\n".join(lines(sources)) + "\n", "utf-8")
    return path


def read(path: Path) -> dict[str, str]:
    """Return the arguments in parentheses, or an empty text, by place, route or variable."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        start = line.find("(")
        found[(line if start < 0 else line[:start]).strip()] = "" if start < 0 else line[start:]
    return found
