"""Block hashes: the same everywhere, different for every tenant, only for full blocks."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.ids import TenantId
from shared.kv.hashing import HashChain, block_hashes

LOCAL = TenantId("")

GOLDEN = {
    ("", 4): ["876a8b304fbe2326a0976496ccc19e94", "10aee2a2b281e300236d1bb50ef33826"],
}


def test_golden_values() -> None:
    """Guards stored and exchanged hashes against a silent change of the recipe."""
    for (tenant, size), expected in GOLDEN.items():
        assert [h.hex() for h in block_hashes(range(9), size, TenantId(tenant))] == expected
    acme = block_hashes([49_151, 0, 4_294_967_295], 3, TenantId("acme"))
    assert [h.hex() for h in acme] == ["afcd3f146c470f278632eaa8ddff472e"]


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_same_in_every_process(seed: str) -> None:
    """Guards scenario 48: a per-process seed would make every cross-process lookup miss."""
    code = (
        "from shared.kv.hashing import block_hashes\n"
        "print(*(h.hex() for h in block_hashes(range(1000), 16, 'acme')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert out.split() == [h.hex() for h in block_hashes(range(1000), 16, TenantId("acme"))]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_only_full_blocks_around_the_boundary(n: int, size: int) -> None:
    """Guards scenario 37: off-by-one at a prefix that ends on a block boundary."""
    tokens = list(range(100, 100 + n * size + 1))
    assert len(block_hashes(tokens[: n * size - 1], size, LOCAL)) == n - 1
    exact = block_hashes(tokens[: n * size], size, LOCAL)
    assert len(exact) == n
    over = block_hashes(tokens, size, LOCAL)
    assert over[:n] == exact
    assert len(over) == (n + 1 if size == 1 else n)


def test_tenants_never_share_a_hash() -> None:
    """Guards scenario 71: the same prompt of two tenants must not hit the other's cache."""
    tenants = ["", "a", "b", "a\x00", "acme", "acme ", "\ud800"]
    seen = [h for t in tenants for h in block_hashes(range(64), 4, TenantId(t))]
    assert len(set(seen)) == len(tenants) * 16


def test_a_hash_depends_on_everything_before_it() -> None:
    """Guards against hits at another position or after another history."""
    base = block_hashes([1, 2, 3, 4, 1, 2, 3, 4], 4, LOCAL)
    assert base[0] != base[1], "same tokens at another position"
    changed = block_hashes([9, 2, 3, 4, 1, 2, 3, 4], 4, LOCAL)
    assert not set(base) & set(changed)
    assert block_hashes([1, 2, 3, 4], 2, LOCAL)[1:] != base[:1], "another block size"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=9),
    st.integers(1, 7),
)
def test_chain_equals_whole(pieces: list[list[int]], size: int) -> None:
    """Guards the incremental form: decode appends one token at a time."""
    chain = HashChain(size, TenantId("t"))
    added = [h for piece in pieces for h in chain.extend(piece)]
    tokens = [t for piece in pieces for t in piece]
    assert added == chain.hashes == block_hashes(tokens, size, TenantId("t"))
    assert chain.num_tokens == len(tokens)
    assert all(len(h) == 16 for h in added)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_token_is_the_callers_error(token: int) -> None:
    """Guards a worker against dying on a token id that no vocabulary has."""
    chain = HashChain(2, LOCAL)
    chain.extend([1])
    with pytest.raises(InvalidRequest, match="out of range"):
        chain.extend([2, token])
    assert (chain.num_tokens, chain.hashes) == (1, [])
