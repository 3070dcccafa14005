"""Pages of docs/reference: under each comment with the name of an object, its signature and docstring as Markdown.

``python -m tests.reference_pages`` writes them. ``members`` in a comment adds the documented public members.
"""

import re
import shutil
import tempfile
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(ROOT.glob("docs/reference/*.md"))
NOTE = "<!-- The rest of this page is written by: python -m tests.reference_pages -->\n"
COMMENT = re.compile(r"^<!-- (lightning_rlhf[.\w]*)( members)? -->$", re.MULTILINE)
ROLE = re.compile(r":\w+:`(~?)([\w.]+)`")
LINE = 100  # longest signature on one line


def load():
    """Return the package with callbacks/ as lightning_rlhf.callbacks, as in a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "lightning_rlhf")
        shutil.copytree(ROOT / "lightning_rlhf", package)
        shutil.copytree(ROOT / "callbacks", package / "callbacks", dirs_exist_ok=True)
        return griffe.load("lightning_rlhf", search_paths=[folder], try_relative_path=False, docstring_parser="google")


def table(titles, rows):
    cells = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *cells))


def signature(instance, path):
    """Return the signature of an object as a call with types and defaults, one argument per line where it is long."""
    if instance.is_attribute:
        return f"{path}: {instance.annotation}" if instance.annotation else path
    changed = [
        text for decorator in getattr(instance, "decorators", ()) if "with_defaults" in (text := str(decorator.value))
    ]
    if changed:
        return f"@{changed[0]}\nclass {path}({', '.join(map(str, instance.bases))})"
    call = instance.all_members.get("__init__") if instance.is_class else instance
    if call is None:
        return path
    call = call.final_target if call.is_alias else call
    whole = call.signature(name=path, return_type=instance.is_function)
    if len(whole) <= LINE:
        return whole
    text = ""
    depth = 0
    for character in whole:
        depth += (character in "([{") - (character in ")]}")
        at_top = depth == 1 and character in "(,"
        text += f"{character}\n    " if at_top else f"\n{character}" if depth == 0 and character == ")" else character
    return text.replace("\n     ", "\n    ")


class Writer:
    """Markdown of objects, with links to those that are on a page."""

    def __init__(self):
        self.package = load()
        self.links = {}
        for page in PAGES:
            for path, _ in COMMENT.findall(page.read_text()):
                instance = self.object(path)
                self.links[instance.path] = self.links[path] = f"{page.name}#{instance.name.lower()}"

    def object(self, path):
        path = path.removeprefix("lightning_rlhf.")
        head, _, rest = path.partition("callbacks.")
        if not head and rest and "." not in rest:  # the folder takes its public names from this module
            path = f"callbacks.public.{rest}"
        instance = self.package[path]
        return instance.final_target if instance.is_alias else instance

    def linked(self, path, name):
        """Return a name as code, as a link if it is on a page."""
        return f"[`{name}`]({self.links[path]})" if path in self.links else f"`{name}`"

    def code(self, expression):
        """Return a type as code, with links to documented classes."""
        parts = expression.iterate(flat=True) if isinstance(expression, griffe.Expr) else [str(expression or "")]
        text = "".join(
            f"`{self.linked(part.canonical_path, part.name)}`"
            if getattr(part, "canonical_path", None) in self.links
            else str(getattr(part, "name", part))
            for part in parts
        )
        return f"`{text}`".replace("``", "")

    def prose(self, text):
        """Return the text of a docstring with its roles as code and with links to documented classes."""
        return ROLE.sub(lambda role: self.linked(role[2], role[2].rpartition(".")[2] if role[1] else role[2]), text)

    def section(self, section):
        if section.kind.value == "text":
            return self.prose(section.value)
        rows = [[self.code(item.annotation), self.prose(item.description)] for item in section.value]
        match section.kind.value:
            case "parameters":
                for row, item in zip(rows, section.value, strict=True):
                    row[0] += f" = `{item.default}`" if item.default else ""
                    row.insert(0, f"`{item.name}`")
                return table(["argument", "type = default", "meaning"], rows)
            case "raises":
                return table(["error", "raised if"], rows)
            case "returns":
                return table(["returned", "meaning"], rows)
        raise NotImplementedError(f"a docstring with a section of {section.kind.value}")

    def document(self, instance, path, title):
        """Return heading, signature, bases and docstring."""
        parts = [title, f"```py\n{signature(instance, path)}\n```"]
        if instance.is_class and instance.bases:
            parts.append("Base: " + ", ".join(map(self.code, instance.bases)))
        parts += map(self.section, instance.docstring.parsed if instance.docstring else [])
        return "\n\n".join(parts) + "\n"

    def documents(self, path, with_members):
        """Return the Markdown of an object and, on request, of its documented public members."""
        instance = self.object(path)
        texts = [self.document(instance, path, f"## {instance.name}")]
        members = instance.members.values() if with_members else ()
        for member in members:
            if member.has_docstring and not member.name.startswith("_"):
                name = f"{instance.name}.{member.name}"
                texts.append(self.document(member, member.name, f"### {name}"))
        return "\n".join(texts)

    def content(self, page):
        """Return the expected content of a page: its text above the note, then the reference of the objects that it
        lists."""
        text = page.read_text()
        documents = [f"{result[0]}\n\n{self.documents(result[1], result[2])}" for result in COMMENT.finditer(text)]
        return "\n".join([text.partition(NOTE)[0] + NOTE, *documents])


if __name__ == "__main__":
    writer = Writer()
    for page in PAGES:
        page.write_text(writer.content(page))
