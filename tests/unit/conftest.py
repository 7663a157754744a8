"""Unit tests load many tiny models: what is found out about them stays out of the user's cache."""

from collections.abc import Iterator
from typing import Any

import pytest

from shared.engine import recipe


@pytest.fixture(scope="session", autouse=True)
def recipes_of_their_own(tmp_path_factory: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(recipe, "cache_dir", lambda: folder)
        yield
