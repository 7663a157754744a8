"""No source of ours turns received or stored bytes into code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "unsafe_load", "full_load"}
DOTTED = {"torch.load", "torch.save", "numpy.load", "np.load"}
DOTTED |= {f"yaml.{loader}" for loader in ("Loader", "CLoader", "FullLoader", "UnsafeLoader")}
SOURCES = sorted(
    path
    for folder in ("services", "shared", "tools", "sdk")
    for path in (ROOT / folder).rglob("*.py")
)


def _findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id in BUILTINS else []
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node), node.attr if node.attr in METHODS else ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] in MODULES or name in BUILTINS | METHODS | DOTTED:
                yield f"line {getattr(node, 'lineno', 0)}: {name}"


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_unpickling_and_no_eval(path: Path) -> None:
    """Unpickling what a socket brought has been remote code execution in every peer project."""
    assert list(_findings(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import pickle as p",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "socket.recv_pyobj()",
        "eval('1')",
        "f = exec",
        "import yaml\nyaml.load(x, yaml.FullLoader)",
    ],
)
def test_the_scan_sees_what_it_must(source: str) -> None:
    assert list(_findings(source))


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('x')", "torch.compile(f)"])
def test_the_scan_lets_harmless_code_pass(source: str) -> None:
    assert not list(_findings(source))
