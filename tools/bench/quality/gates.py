"""How much quality a precision may cost; one row per precision.

The bounds are provisional: ``diptych bench quality`` has not been run over its whole text yet.
"""

from typing import Final

from msgspec import Struct

from shared.config import Precision


class Gate(Struct, frozen=True, kw_only=True):
    """Bounds against fp32: ``top1`` at least; ``perplexity`` (relative) and ``kl`` at most."""

    top1: float
    perplexity: float
    kl: float


GATES: Final[dict[Precision, Gate]] = {
    "fp32": Gate(top1=0.999, perplexity=0.0005, kl=0.0005),
    "bf16": Gate(top1=0.97, perplexity=0.01, kl=0.01),
}
