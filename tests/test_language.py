"""Plain technical English in code and documentation: the patterns that made earlier versions hard to read stay out.

Print the findings of some files or folders with ``python -m tests.test_language lightning_rlhf/rollout docs``.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("lightning_rlhf", "callbacks", "examples", "benchmarks")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "configs", "constraints", "examples")
GENERATED = ("docs/performance.md",)

# In docstrings, comments, messages and documentation. Each pattern has the plain word to use.
PHRASES = {
    r"\b(says?|said|tells?|told|speaks?|spoke)\b": "return, log, report, raise, contain, specify, show",
    r"\b(?<!there )(is|are) no (?!longer|more|less|need)": "is not a, has no",
    r"\b(is|are) none\b|\bthere (is|are) none\b|\bnone of them\b": "is not, not found, missing",
    r"\bwhat (is|are|was|were|it|of|came|comes|a|an|the|this|that|they|has|have|had|can|does|did|must|may|no|one)\b": "name the thing",
    r"(^|[.:;] )[Ww]hat \w+s\b": "name the thing",
    r"\b(nobody|whoever|whatever|whichever|likewise|anew|rightly|surer|learnt|thereby|hereby|afterwards)\b": "no one, any, again, correctly, learned, after",
    r"\bof one's own\b|\bof (its|their|your) own\b": "own, separate",
    r"\bas .{1,20} has it\b|\bby itself\b|\bcome again\b|\bgoes? on\b|\bgo on\b|\bgoing on\b": "continue, resume, alone",
    r"\b(jury|juries|doors?|doorkeeper|keeper|guilty|rehears\w+|obeys?|impatient\w*|riddles?|stranger)\b": "the field's term",
    r"\bwithout a word\b|\bin a sentence\b|\bis a sentence\b|\bone sentence\b": "silently, one-line message",
    r"\bof no account\b|\bby accident\b|\bslip of the pen\b|\bin passing\b": "ignored, temporary",
    r"\b(lies|lay|lain) (in|on|at|under|where|there|beside|behind|next)\b": "is in, is located",
}
# First words of argument and attribute lines that need the function to be understood.
BARE_STARTS = set(
    "of that whose with from to behind for by under in on what who where as likewise see which how until before after "
    "beside it they is are was".split()
)
# Parts of the names of classes, functions, arguments and variables.
NAMES = set(
    "told said says tell tells asked asks guilty jury door doors keeper rehearse whoever nobody strayed".split()
)
WHOLE_NAMES = set("found given place places kept told said asked chosen anyone someone".split())
VERBS = set(
    """
    Accept Accumulate Add Advance Aggregate Agree All-gather Allocate Announce Answer Append Apply Ask Assemble Assert Assign
    Average Backpropagate Balance Begin Bind Block Broadcast Build Bundle Call Cancel Cast Check Choose Chunk Classify Clean
    Clear Clip Close Collate Collect Combine Compare Complete Compute Concatenate Configure Connect Construct Continue Convert
    Copy Count Create Cut Deal Decide Decode Decompose Delete Derive Describe Destroy Detach Detect Determine Digest Disable
    Discard Display Divide Drop Dump Enable Encode End Ensure Enter Enumerate Estimate Evaluate Exchange Execute Exit Expand
    Explain Export Extend Extract Fetch Fill Filter Find Finish Fit Flatten Flush Format Forward Free Freeze Gather Generate
    Get Give Group Guess Handle Hash Hide Ignore Import Index Initialize Insert Inspect Install Instantiate Interpret Invert
    Iterate Join Keep Kill Label Launch Lay Let Limit Link List Listen Load Locate Lock Log Look Lower Make Map Mark Mask
    Match Measure Merge Move Multiply Name Normalize Notify Offload Open Order Pack Pad Parse Partition Pass Patch Pause Pick
    Place Plan Point Poll Pop Predict Prepare Print Process Propagate Prune Publish Pull Push Put Query Queue Raise Read
    Rebuild Receive Record Recover Reduce Refuse Register Reject Release Reload Remove Rename Render Repeat Replace Report
    Request Require Rescale Reserve Reset Reshape Resolve Restart Restore Resume Retry Return Reverse Revert Rewrite Round
    Route Run Sample Save Scale Scan Scatter Schedule Score Search See Seed Select Send Separate Serialize Serve Set Shard
    Share Show Shuffle Shut Signal Simulate Skip Sleep Slice Sort Split Stack Start Step Stop Store Stream Strip Subtract Sum
    Swap Switch Sync Synchronize Take Tear Tell Terminate Test Time Tokenize Track Train Transform Translate Trim Truncate
    Try Turn Undo Unfreeze Unload Unmap Unpack Unwrap Update Use Validate Verify Visit Wait Wake Walk Warn Watch Weight Wrap
    Write Yield Zero
    """.split()
) - {"Tell", "Ask"}
MATHEMATICS = ("lightning_rlhf/functional", "lightning_rlhf/objectives")  # a noun phrase names what a formula computes
PROPERTIES = ("property", "setter", "fixture", "contextmanager")
# Folders whose words were not yet gone over. Nothing is added here.
PENDING = (
    "lightning_rlhf/__main__.py",
    "lightning_rlhf/attention.py",
    "lightning_rlhf/batching/",
    "lightning_rlhf/callbacks/",
    "lightning_rlhf/cli/",
    "lightning_rlhf/compat.py",
    "lightning_rlhf/data/",
    "lightning_rlhf/functional/",
    "lightning_rlhf/interrupts.py",
    "lightning_rlhf/launch_environment.py",
    "lightning_rlhf/metric_names.py",
    "lightning_rlhf/models/",
    "lightning_rlhf/modules/",
    "lightning_rlhf/objectives/",
    "lightning_rlhf/paths.py",
    "lightning_rlhf/planning/",
    "lightning_rlhf/rewards/",
    "lightning_rlhf/rollout/",
    "lightning_rlhf/seeding.py",
    "lightning_rlhf/serving/",
    "lightning_rlhf/strategies/",
    "lightning_rlhf/tensor_batch.py",
    "lightning_rlhf/types.py",
    "callbacks/",
    "benchmarks/",
    "examples/",
    "docs/",
    "configs/",
    "constraints/",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)


def phrases(text, line):
    """Findings of a text: (line, words, remedy)."""
    plain = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|https?://\S+", "", text)
    for number, part in enumerate(plain.splitlines()):
        for pattern, remedy in PHRASES.items():
            for match in re.finditer(pattern, part, re.IGNORECASE):
                yield line + number, match.group().strip(), remedy


def argument_lines(docstring):
    """(offset, first word) of each entry under Args, Attributes and Raises of a Google docstring."""
    section, indent = "", 0
    for number, line in enumerate(docstring.splitlines()):
        if header := re.fullmatch(r"(Args|Arguments|Attributes):", line.strip()):
            section, indent = header.group(1), len(line) - len(line.lstrip()) + 4
        elif section and line.strip() and len(line) - len(line.lstrip()) < indent:
            section = ""
        elif section and (entry := re.match(rf" {{{indent}}}\**\w[\w, *`]*(?: \([^)]*\))?: *(\S+)", line)):
            yield number, entry.group(1).strip(",.;:`")


def docstring_findings(node, in_mathematics):
    docstring = ast.get_docstring(node, clean=True)
    if docstring is None:
        return
    line = node.body[0].lineno
    for number, first in argument_lines(docstring):
        if first in BARE_STARTS:
            yield line + number, f"an argument line begins with {first!r}", "begin with the noun"
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function and not in_mathematics and not node.name.startswith("test_"):
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        first = docstring.split()[0].strip(".,:;")
        if first not in VERBS and not any(kind in decorators for kind in PROPERTIES):
            yield line, f"the docstring of {node.name} begins with {first!r}", "begin with an imperative verb of VERBS"


def names_of(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def source_findings(path):
    text = path.read_text()
    in_mathematics = str(path.relative_to(ROOT)).startswith(MATHEMATICS)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if node.body:
                yield from docstring_findings(node, in_mathematics)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from phrases(node.value, node.lineno)
        for name in names_of(node):
            parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name)}
            if parts & NAMES or name in WHOLE_NAMES:
                yield getattr(node, "lineno", 0), f"the name {name}", "name the thing"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from phrases(token.string, token.start[0])


def document_findings(path):
    fenced, lines = False, []
    for line in path.read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        lines.append(
            ""
            if fenced and path.suffix == ".md"
            else line.split("#", 1)[-1]
            if path.suffix == ".yaml" and "#" in line
            else line
            if path.suffix == ".md"
            else ""
        )
    yield from phrases("\n".join(lines), 1)


def files():
    for top in SOURCES:
        yield from ((path, source_findings) for path in sorted((ROOT / top).rglob("*.py")))
    for top in DOCUMENTS:
        paths = [ROOT / top] if (ROOT / top).is_file() else sorted((ROOT / top).rglob("*"))
        yield from ((path, document_findings) for path in paths if path.suffix in (".md", ".yaml"))


def findings(tops=()):
    for path, look in files():
        name = str(path.relative_to(ROOT))
        if (not tops or name.startswith(tuple(tops))) and name not in GENERATED:
            yield from (f"{name}:{line}: {words} -> {remedy}" for line, words, remedy in sorted(set(look(path))))


def test_names_docstrings_messages_and_documents_are_plain():
    rest = [finding for finding in findings() if not finding.startswith(PENDING)]
    assert not rest, "\n".join(rest[:50])


if __name__ == "__main__":
    print(*findings(sys.argv[1:]), sep="\n")
