"""The pages of options of other trainers, from their tables: ``python -m tests.migration_page``."""

from pathlib import Path

from lightning_rlhf.extras.migration.parts import table

ROOT = Path(__file__).resolve().parents[1]
_TRL = """# Every option of TRL

Look up what an option of TRL 1.16 is here, or why you won't find it. [From TRL](from_trl.md) shows whole configurations
first. `lightning-rlhf new my_task --from-trl config.json` writes a configuration from yours, and lists what it could
not carry over.
Options that a class shares with others are in the first tables.

<!-- The tables are written by: python -m tests.migration_page -->
"""


_VERL = """# Every option of verl's scripts

Look up what an option of verl's example scripts is here, or why you won't find it. [From verl](from_verl.md) shows a
whole script first. `lightning-rlhf new my_task --from-verl run.sh` writes a configuration from yours, without executing
it, and lists what it could not carry over. `*` stands for any further parts of a name.

<!-- The tables are written by: python -m tests.migration_page -->
"""


OTHERS = {"openrlhf": "OpenRLHF", "axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "swift": "ms-swift"}
_OTHER = """# Every option of {title}

Look up what an option of {title} is here, or why you won't find it. Options that several of its programs share stand in
one table.

<!-- The tables are written by: python -m tests.migration_page -->
"""


def pages():
    """Return the text of each page by its file."""
    texts = {"trl": _TRL, "verl": _VERL}
    texts |= {program: _OTHER.format(title=title) for program, title in OTHERS.items()}
    return {ROOT / f"docs/options_of_{program}.md": text + tables(program) for program, text in texts.items()}


def tables(program):
    """Return a table for each section."""
    parts = []
    for section, options in table(program).items():
        rows = "\n".join(f"| `{name}` | {entry.sentence()} |" for name, entry in options.items())
        parts.append(f"\n## {section}\n\n| option | here |\n|---|---|\n{rows}\n")
    return "".join(parts)


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
