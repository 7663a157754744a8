"""Run a test on every instruction set level this CPU has, and on the torch fallback."""

from collections.abc import Iterator

import pytest

from shared.kernels import llama, ops
from shared.kernels.build import TIERS
from shared.kernels.load import native, operators, tier

EVERY_TIER = (*TIERS, "torch")
NATIVE_TIERS = tuple(TIERS)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use the tier named by the parameter; skip where the CPU or the build lacks it."""
    name: str = request.param
    if not native():
        if name != "torch":
            pytest.skip("no compiler: native kernels were not built")
        yield name
        return
    if name == "torch":
        monkeypatch.setattr(ops, "native", lambda: False)
        monkeypatch.setattr(llama, "native", lambda: False)
        yield name
        return
    best = tier()
    if not operators().use_tier(name):
        pytest.skip(f"this CPU cannot run {name}")
    yield name
    operators().use_tier(best)
