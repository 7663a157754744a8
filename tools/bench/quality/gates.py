"""How much quality a precision may cost; one row per precision, and with KV in int8.

Measured over 3,577 positions of SmolLM2-135M (docs/decisions/0007, 0008): bf16 chooses fp32's best
token at 99.1 % of them, KL 0.00016; int8 at 97.8 %, KL 0.0011; int4, whose grids this model's file
has, at 99.6 %, KL 0.00004. One standard error of such a share is 0.16, 0.25 and 0.11 points; the
bounds are more than three away.

fp16, over 511 positions: 99.7 % (standard error 0.24), KL 0.00002.

With KV in int8: fp32 98.6 % (decode 97.9 %), KL 0.0007; bf16 98.0 %, 0.0008; int8 97.1 %, 0.0017;
over 511 positions fp16 98.2 %, 0.0006, and int4 97.9 %, 0.0006 (standard error 0.6).

fp8, emulated on a CPU (docs/gpu.md): weights 90.5 % (standard error 0.5), KL 0.023; KV 95.1 %
(0.4), 0.0045; both 90.1 %, 0.026. Three bits of a fraction are few: its bounds are its own.
"""

from typing import Final

from msgspec import Struct

from shared.kv.layout import KvDtype
from shared.precision import Precision


class Gate(Struct, frozen=True, kw_only=True):
    """Bounds against fp32: ``top1`` at least; ``perplexity`` (relative) and ``kl`` at most."""

    top1: float
    perplexity: float
    kl: float


GATES: Final[dict[Precision, Gate]] = {
    "fp32": Gate(top1=0.999, perplexity=0.0005, kl=0.0003),
    "bf16": Gate(top1=0.985, perplexity=0.01, kl=0.0005),
    "fp16": Gate(top1=0.99, perplexity=0.005, kl=0.0003),
    "int8": Gate(top1=0.97, perplexity=0.02, kl=0.002),
    "int4": Gate(top1=0.99, perplexity=0.005, kl=0.0003),
    "fp8": Gate(top1=0.885, perplexity=0.04, kl=0.035),
}


INT8_KV_GATES: Final[dict[Precision, Gate]] = {
    "fp32": Gate(top1=0.97, perplexity=0.01, kl=0.0015),
    "bf16": Gate(top1=0.97, perplexity=0.01, kl=0.0015),
    "fp16": Gate(top1=0.97, perplexity=0.01, kl=0.0015),
    "int8": Gate(top1=0.96, perplexity=0.02, kl=0.003),
    "int4": Gate(top1=0.97, perplexity=0.01, kl=0.0015),
}

FP8_KV_GATE: Final = Gate(top1=0.94, perplexity=0.01, kl=0.007)
"""With weights of any other precision."""

_FINER: Final[dict[Precision, tuple[KvDtype, ...]]] = {
    "fp32": ("bf16", "fp16"),
    "fp16": ("bf16",),
}
"""KV that rounds more than the weights it belongs to."""


def gate_for(precision: Precision, kv_dtype: KvDtype) -> Gate:
    """Return the bounds of weights and KV together.

    KV that rounds more than the weights may cost what weights of its kind may.
    """
    if precision == "fp8":
        return GATES["fp8"]
    if kv_dtype == "int8":
        return INT8_KV_GATES[precision]
    if kv_dtype == "fp8":
        return FP8_KV_GATE
    own = GATES[precision]
    if kv_dtype not in _FINER.get(precision, ()):
        return own
    kv = GATES[kv_dtype]
    return Gate(
        top1=min(own.top1, kv.top1),
        perplexity=max(own.perplexity, kv.perplexity),
        kl=max(own.kl, kv.kl),
    )
