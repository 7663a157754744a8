"""The documents name everything there is, and point only at what exists."""

import re
import tomllib
from pathlib import Path

import msgspec.inspect
import pytest

from shared.config import Deployment, load_deployment

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def keys(node: msgspec.inspect.Type) -> set[str]:
    if isinstance(node, msgspec.inspect.UnionType):
        return set().union(*(keys(arm) for arm in node.types))
    if not isinstance(node, msgspec.inspect.StructType):
        return set()
    return {field.name for field in node.fields}.union(*(keys(f.type) for f in node.fields))


def test_every_config_key_is_explained() -> None:
    text = re.sub(
        r"```.*?```", "", (ROOT / "docs" / "configuration.md").read_text(), flags=re.DOTALL
    )
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert keys(msgspec.inspect.type_info(Deployment)) - named == set()


def test_every_dependency_is_justified() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=\[~! ]", requirement)[0] for requirement in wanted} - {"diptych"}
    assert {name for name in names if not re.search(rf"\b{name}\b", text, re.IGNORECASE)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert [t for t in targets if not (document.parent / t).exists()] == []


@pytest.mark.parametrize("document", ["testing.md", "scenarios.md", "transfer.md"])
def test_every_test_that_a_document_names_exists(document: str) -> None:
    """Guards a page that says what is shown after the test that shows it was renamed."""
    text = (ROOT / "docs" / document).read_text()
    named = re.findall(r"`(?:tests/)?(\w+/test_\w+\.py)(?:::(\w+)(…)?)?`", text)
    missing = []
    for file, test, _ in named:
        path = ROOT / "tests" / file
        if not path.exists() or f"def {test}" not in path.read_text():
            missing.append(f"{file}::{test}")
    assert named and missing == []


def test_every_shipped_deployment_loads_and_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(configs) >= 4
    for config in configs:
        assert load_deployment(config).name == config.stem
        assert f"`configs/{config.name}`" in text
