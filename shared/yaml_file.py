"""YAML as a deployment file may use it: one mapping, no key twice, errors with a line."""

from collections.abc import Hashable
from pathlib import Path

import yaml

from shared.errors import BadConfig


class _StrictLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; this loader refuses the second."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path) -> dict[str, object]:
    """Return the mapping in a YAML file.

    Raises:
        BadConfig: unreadable, not YAML, a repeated or non-text key (with the line), or not
            a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"cannot read deployment file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"cannot read deployment file {path}: it is not UTF-8 text") from error
    try:
        tree = yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise BadConfig(f"{path}{line}: {error.problem or 'not YAML'}") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else type(tree).__name__
        raise BadConfig(f"{path}: expected keys such as `name:` and `model:`, found {found}")
    return tree
