"""Size limits of the source tree: they only ever get tighter.

Run as ``python -m tools.ratchet``; prints each breach as ``file:line: what`` and exits 1.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE = 400
MAX_FUNCTION = 60
MAX_PARAMETERS = 7
MAX_MEDIAN_FILE = 150
NO_ANY = "shared/messages/"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_source(name: str, text: str) -> Iterator[str]:
    """Yield the breaches of one file."""
    tree = ast.parse(text, name)
    length = len(text.splitlines())
    if length > MAX_FILE:
        yield f"{name}:1: {length} lines, {MAX_FILE} allowed"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _check_function(name, node)
        elif name.startswith(NO_ANY) and _is_any(node):
            yield f"{name}:{getattr(node, 'lineno', 1)}: `Any` in a message"


def check_median(lengths: dict[str, int]) -> Iterator[str]:
    """Yield a breach if the typical non-test file is too long."""
    counted = [length for length in lengths.values() if length > 0]
    if counted and (median := statistics.median(counted)) > MAX_MEDIAN_FILE:
        yield f"median file has {median:.0f} lines, {MAX_MEDIAN_FILE} allowed"


def _check_function(name: str, node: _Function) -> Iterator[str]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MAX_FUNCTION:
        yield f"{name}:{node.lineno}: {node.name} has {length} lines, {MAX_FUNCTION} allowed"
    count = _parameters(node.args)
    if count > MAX_PARAMETERS:
        yield f"{name}:{node.lineno}: {node.name} has {count} parameters, {MAX_PARAMETERS} allowed"


def _parameters(arguments: ast.arguments) -> int:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    extra = (arguments.vararg, arguments.kwarg)
    return sum(a.arg not in ("self", "cls") for a in named) + sum(a is not None for a in extra)


def _is_any(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="Any") | ast.Attribute(attr="Any"):
            return True
        case ast.alias(name="Any"):
            return True
    return False


def tracked_files(root: Path) -> list[str]:
    """Return the Python files that git knows in ``root`` and that are there."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return sorted(name for name in set(listing.stdout.splitlines()) if (root / name).is_file())


def main() -> int:
    """Check the tree around this file."""
    root = Path(__file__).resolve().parent.parent
    problems: list[str] = []
    lengths: dict[str, int] = {}
    for name in tracked_files(root):
        text = (root / name).read_text(encoding="utf-8")
        problems += check_source(name, text)
        if not name.startswith("tests/"):
            lengths[name] = len(text.splitlines())
    problems += check_median(lengths)
    print("\n".join(problems) or f"{len(lengths)} source files within their limits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
