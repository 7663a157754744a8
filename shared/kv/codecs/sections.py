"""A payload as a sequence of arrays without gaps: those of the widest elements come first."""

from collections.abc import Sequence

import torch

from shared.errors import TransferFailed


def join(sections: Sequence[torch.Tensor]) -> bytearray:
    """Return the bytes of the tensors one after the other."""
    payload = bytearray(sum(section.nbytes for section in sections))
    whole = torch.frombuffer(payload, dtype=torch.uint8)
    start = 0
    for section in sections:
        flat = section.contiguous().view(-1).view(torch.uint8)
        whole[start : start + len(flat)].copy_(flat)
        start += len(flat)
    return payload


def join_as(sections: Sequence[tuple[torch.Tensor, torch.dtype | None]]) -> bytearray:
    """Do the same, converting to a dtype on the way where one is given."""
    sizes = [part.numel() * (dtype or part.dtype).itemsize for part, dtype in sections]
    payload = bytearray(sum(sizes))
    whole = torch.frombuffer(payload, dtype=torch.uint8)
    start = 0
    for (part, dtype), size in zip(sections, sizes, strict=True):
        whole[start : start + size].view(dtype or part.dtype).copy_(part.reshape(-1))
        start += size
    return payload


class SectionReader:
    """Takes arrays off the front of a payload (uint8), as views."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._payload = payload
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return the next array.

        Raises:
            TransferFailed: the payload is too short for it.
        """
        size = dtype.itemsize
        for axis in shape:
            size *= axis
        end = self._at + size
        if end > len(self._payload):
            raise TransferFailed(
                f"encoded KV has {len(self._payload)} payload bytes, needs at least {end}"
            )
        flat = self._payload[self._at : end]
        self._at = end
        return flat.view(dtype).view(shape)

    def done(self) -> None:
        """Check that nothing is left.

        Raises:
            TransferFailed: there is.
        """
        if self._at != len(self._payload):
            raise TransferFailed(
                f"encoded KV has {len(self._payload)} payload bytes, needs {self._at}"
            )
