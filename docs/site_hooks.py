"""Hooks of the documentation site: files outside docs/ that a page links to become pages of the site, under files/.

The same links work where the repository's files are read directly.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?\)")
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_FILES = "files/"
_WORKER = "https://unpkg.com/iframe-worker/shim"
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".cfg": "ini", ".jsonl": "json", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the schema, and a page for each file or folder that a page links to, also a page that is added here."""
    root = Path(config.docs_dir).parent
    schema = (root / "lightning_rlhf/extras/schema/schema.json").read_text(encoding="utf-8")
    files.append(File.generated(config, "schema.json", content=schema))  # for editors
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    while waiting:
        source = waiting.pop()
        for target in _outside(source, root):
            page = _page_of(target)
            if files.get_file_from_path(page) is None:
                files.append(File.generated(config, page, content=_content(root, target)))
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files outside docs/ to their pages."""
    source = _source_of(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def pointed(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        inside = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        return f"{match[1]}{posixpath.relpath(inside, here)}{match[3] or ''})"

    return _LINK.sub(pointed, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mend the code in the cells of tables.

    The backslash before a bar is removed: GitHub needs it, and Python-Markdown shows it. Names may break after slashes
    and commas; site.css lets them break nowhere else.
    """

    def mended(cell: re.Match[str]) -> str:
        text = cell[0].replace(r"\|", "|")
        return _CODE.sub(lambda code: re.sub("([/,])", r"\1<wbr>", code[0]), text)

    return _CELL.sub(mended, html)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load the script that the search from disk needs from the site, where the theme loads it from another machine."""
    return output.replace(_WORKER, posixpath.relpath("iframe_worker.js", posixpath.dirname(page.file.dest_uri)))


def on_post_template(output: str, **_: Any) -> str:
    """Load the script of the page for missing addresses from the site, too."""
    return output.replace(_WORKER, "iframe_worker.js")


def _target(source: str, link: str) -> str | None:
    """Return the path in the repository that a link of a file points to; None for links to other machines."""
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _outside(source: str, root: Path) -> list[str]:
    """Return the existing targets of a Markdown file's links that are outside docs/."""
    if not source.endswith(".md"):
        return []
    targets = (_target(source, match[2]) for match in _LINK.finditer((root / source).read_text(encoding="utf-8")))
    return [target for target in targets if target and not target.startswith("docs/") and (root / target).exists()]


def _page_of(target: str) -> str:
    return f"{_FILES}{target}" if target.endswith(".md") else f"{_FILES}{target}.md"


def _source_of(page: str) -> str:
    """Return the path in the repository of a page's text."""
    return page.removeprefix(_FILES) if page.startswith(_FILES) else f"docs/{page}"


def _content(root: Path, target: str) -> str:
    """Return the Markdown text of a file's page: Markdown as it is, other files as code, folders as lists."""
    path = root / target
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith(("_", ".")))
        return f"# {target}\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = path.read_text(encoding="utf-8")
    if target.endswith(".md"):
        return text
    return f"# {target}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
