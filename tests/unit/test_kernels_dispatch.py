"""The tier that runs is the best one of this CPU, by another source than the kernels' own."""

import pytest

from shared.cpuinfo import cpu_flags
from shared.kernels.build import TIERS
from shared.kernels.load import native, operators, tier
from tests.unit.cpu_tiers import NEEDED, runnable

pytestmark = pytest.mark.timeout(400)  # the first use compiles

AVX512 = {*NEEDED["avx2"], *NEEDED["avx512"]}


def test_the_best_tier_of_this_cpu_is_taken() -> None:
    """Guards: a wrong bit of cpuid that sends every machine to slow kernels, or to a crash."""
    if not native():
        pytest.skip("no compiler: native kernels were not built")
    here = runnable(cpu_flags())
    assert tier() == here[-1]
    assert [name for name in TIERS if operators().use_tier(name)] == here
    assert operators().use_tier(here[-1])


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (set(), "generic"),
        ({"avx2", "fma"}, "generic"),
        ({"avx2", "fma", "f16c"}, "avx2"),
        (AVX512 - {"avx512_vnni"}, "avx2"),
        (AVX512, "avx512"),
        ({*AVX512, "avx512_bf16"}, "avx512bf16"),
        ({*AVX512, *NEEDED["amx"]}, "avx512"),
        ({*AVX512, "avx512_bf16", *NEEDED["amx"]}, "amx"),
    ],
)
def test_flags_mean_tiers(flags: set[str], best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier needs those below it; Linux writes some flags with an underscore."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert runnable(flags)[-1] == best
    assert tuple(NEEDED) == tuple(TIERS)
