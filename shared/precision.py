"""Precisions of weights, what they mean for keys and values, and what ``auto`` is here."""

from typing import Literal

from shared.cpuinfo import cpu_flags
from shared.kv.layout import KvDtype
from shared.messages.fleet import Role

Precision = Literal["fp32", "bf16", "fp16", "int8", "int4", "fp8"]
PrecisionRule = Precision | Literal["auto"]


def chosen_precision(rule: PrecisionRule, role: Role, device: str) -> Precision:
    """Return what ``rule`` means for a worker on this machine.

    ``auto`` is the fastest one within the quality bounds of int8: on CPUs int8, but bf16 for
    prefill where there is a matrix unit (docs/decisions/0009-amx.md); on GPUs bf16.
    """
    if rule != "auto":
        return rule
    if device != "cpu" or (role == "prefill" and "amx_bf16" in cpu_flags()):
        return "bf16"
    return "int8"


def kv_dtype_for(precision: PrecisionRule, asked: KvDtype | None) -> KvDtype:
    """Return the dtype of keys and values: the one asked for, or what suits the weights."""
    if asked is not None:
        return asked
    match precision:
        case "int8" | "int4" | "fp8" | "auto":
            return "bf16"
    return precision


def slow_precision(precision: PrecisionRule, role: Role, device: str) -> str | None:
    """Say what makes a worker slow that its deployment file asks for, None where nothing does."""
    if precision != "fp16" or device != "cpu":
        return None
    return (
        f"`workers.{role}.precision: fp16` on a CPU runs in torch's own layers, which take ten "
        "times as long as bf16 for prompts: use bf16, int8 or auto"
    )
