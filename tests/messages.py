"""Print all messages of expected errors, with ``{}`` for their values, so that they can be read and compared as text.

``python -m tests.messages > after.txt`` beside one of another commit shows what a change did to them.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLASSES = {"UsageError", "RunError", "MissingFileError", "MissingPackageError", "NonFiniteError"}


def text_of(node):
    """Return a message with ``{}`` for its values, or None where it is not a literal."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def messages():
    """Return a line for each message: its file, its class and its text."""
    lines = []
    for path in sorted([*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id in CLASSES and (text := text_of(call.args[0])):
                lines.append(f"{name}: {call.func.id}: {' '.join(text.split())}")
    return sorted(lines)


if __name__ == "__main__":
    print("\n".join(messages()))
