"""Fix rotary frequencies that would otherwise depend on what else is in the packed batch.

``dynamic`` and ``longrope`` pick frequencies by the largest position of the forward pass, and a
packed pass holds many sequences. They are chosen once, for ``max_model_len``, as vLLM does.
"""

import logging
from collections.abc import Mapping

import torch

from shared.errors import UnsupportedModel

_log = logging.getLogger(__name__)


def pin_rope(model: torch.nn.Module, max_model_len: int) -> bool:
    """Freeze every length-dependent rotary embedding, and log that outputs depend on it.

    Returns whether there was one.

    Raises:
        UnsupportedModel: a rotary embedding cannot be frozen.
    """
    pinned: set[str] = set()
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _depends_on_length(rope_type):
            _run(module, name, max_model_len)
            setattr(module, "rope_type", "default")  # noqa: B010
            pinned.add(rope_type)
        elif isinstance(rope_type, Mapping):
            for layer_type, kind in rope_type.items():
                if _depends_on_length(kind):
                    _run(module, name, max_model_len, layer_type)
                    pinned.add(kind)
            fixed = {t: "default" if _depends_on_length(k) else k for t, k in rope_type.items()}
            setattr(module, "rope_type", fixed)  # noqa: B010
    if pinned:
        _log.warning(
            "rotary frequencies (%s) are fixed for max_model_len %d",
            ", ".join(sorted(pinned)),
            max_model_len,
        )
    return bool(pinned)


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _run(module: torch.nn.Module, name: str, max_model_len: int, *layer_type: str) -> None:
    try:
        module(torch.zeros(1), torch.tensor([[max_model_len - 1]]), *layer_type)
    except (TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise UnsupportedModel(
            f"rotary embedding {name} depends on the batch and cannot be fixed: {error}"
        ) from error
