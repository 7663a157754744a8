"""Names the mark of tests that need a container engine."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "compose: needs a container engine")
