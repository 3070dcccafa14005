"""``python -m tests.voice [PAGE]...``: how a page sounds, in occurrences per 1,000 words. No test enforces it.

Code, tables, headings and the targets of links do not count. Beside each ratio stands the range of three other projects
(tinker-cookbook, TRL and prime-rl), measured in the same way on their documentation in November 2026.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_PROSE = (
    (re.compile(r"```.*?```", re.DOTALL), ""),
    (re.compile(r"^\|.*$", re.MULTILINE), ""),
    (re.compile(r"`[^`]*`"), "X"),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"<[^>]+>"), ""),
    (re.compile(r"^#.*$", re.MULTILINE), ""),
)
RATIOS = {
    "you, we": (r"\b(you|your|we|our|let.s)\b", 9.2, 21.3),
    "has, have": (r"\b(has|have|had)\b", 0.9, 3.7),
    "that of": (r"\b(that|those) of\b", 0.0, 0.1),
    "whose, which": (r"\b(whose|which)\b", 1.3, 2.8),
    "semicolons": (r";", 1.4, 6.0),
}


def prose(text: str) -> str:
    """Return the sentences of a page."""
    for pattern, replacement in NOT_PROSE:
        text = pattern.sub(replacement, text)
    return text


def measured(text: str) -> tuple[int, dict[str, float]]:
    """Return the number of words of prose, and each ratio."""
    text = prose(text)
    words = len(re.findall(r"[A-Za-z']+", text))
    counts = {name: len(re.findall(pattern, text, re.IGNORECASE)) for name, (pattern, *_) in RATIOS.items()}
    return words, {name: 1000 * count / max(words, 1) for name, count in counts.items()}


def main(names: list[str]) -> None:
    """Print a line for each page, and one for all."""
    pages = [Path(name) for name in names] or sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    pages = [page for page in pages if "reference" not in page.parts]
    print(f"{'':44} {'words':>6}  " + "  ".join(f"{name:>12}" for name in RATIOS))
    for page in pages:
        words, ratios = measured(page.read_text(encoding="utf-8"))
        print(
            f"{page!s:.44}".replace(f"{ROOT}/", "").ljust(44),
            f"{words:6}  ",
            "  ".join(f"{x:12.1f}" for x in ratios.values()),
        )
    words, ratios = measured("\n".join(page.read_text(encoding="utf-8") for page in pages))
    print(f"{'all':44} {words:6}  ", "  ".join(f"{x:12.1f}" for x in ratios.values()))
    print(f"{'peers':51}  ", "  ".join(f"{low:>6.1f}..{high:<4.1f}" for _, low, high in RATIOS.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
