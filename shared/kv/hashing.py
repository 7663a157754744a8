"""Names of full KV blocks: a chained hash of tenant and all tokens up to the block's end.

Equal hashes mean equal KV: 16 bytes of BLAKE2b leave a chance of 2^-64 for one collision
among 2^32 blocks, so tokens are not compared on a hit. Nothing depends on the process
(``PYTHONHASHSEED``), the machine or its byte order.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from shared.errors import InvalidRequest
from shared.ids import BlockHash, TenantId

HASH_BYTES: Final = 16
_TENANT = b"diptych/tenant/1"
_BLOCK = b"diptych/block/1"


class HashChain:
    """Hashes of the full blocks of a growing sequence.

    ``hashes[i]`` names tokens ``[0, (i + 1) * block_size)`` of this tenant; an unfinished
    last block has no hash.
    """

    def __init__(self, block_size: int, tenant: TenantId) -> None:
        if block_size < 1:
            raise ValueError(f"block size must be >= 1, not {block_size}")
        self.hashes: list[BlockHash] = []
        self._block = struct.Struct(f"<{block_size}I")
        self._block_size = block_size
        self._pending: list[int] = []
        self._parent = hashlib.blake2b(
            tenant.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=_TENANT
        ).digest()

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return len(self.hashes) * self._block_size + len(self._pending)

    def extend(self, tokens: Sequence[int]) -> list[BlockHash]:
        """Append tokens and return the hashes of the blocks they completed.

        Raises:
            InvalidRequest: a token id is outside [0, 2^32); no token was appended.
        """
        for token in tokens:
            if not 0 <= token < 1 << 32:
                raise InvalidRequest(f"token id {token} is out of range", param="prompt")
        tokens = [*self._pending, *tokens]
        size = self._block_size
        full = len(tokens) // size * size
        added = [self._next(tokens[i : i + size]) for i in range(0, full, size)]
        self._pending = tokens[full:]
        self.hashes += added
        return added

    def _next(self, tokens: Sequence[int]) -> BlockHash:
        content = self._parent + self._block.pack(*tokens)
        self._parent = hashlib.blake2b(content, digest_size=HASH_BYTES, person=_BLOCK).digest()
        return BlockHash(self._parent)


def block_hashes(tokens: Sequence[int], block_size: int, tenant: TenantId) -> list[BlockHash]:
    """Return the hash of each full block of ``tokens``; see ``HashChain``."""
    return HashChain(block_size, tenant).extend(tokens)
