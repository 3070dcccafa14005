"""Units and meanings of docs/metrics.md as the data that the report page shows.

``python -m tests.metric_definitions`` writes lightning_rlhf/extras/report/metrics.json.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "lightning_rlhf/extras/report/metrics.json"


def plain(text):
    """Return the text of a table cell without Markdown markup."""
    return text.replace("`", "").replace("\\|", "|").strip()


def table():
    """Return units and meanings by the name of the row, in the order of the page."""
    logged = (ROOT / "docs/metrics.md").read_text().partition("## Not logged")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| ((?:\\\||[^|])*) \|", logged, re.MULTILINE)
    return {name: [plain(unit), plain(meaning)] for name, unit, meaning in rows}


def content():
    return json.dumps(table(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(content())
