"""Weights of a Llama-family model straight from its safetensors files."""

from contextlib import ExitStack
from pathlib import Path

import torch
from msgspec import Struct
from safetensors import safe_open

from shared.engine.weights import weight_files
from shared.kernels.llama_parts import LayerParts, Projection

_LINEARS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")


class LlamaNames(Struct, frozen=True):
    """``prefix`` is what layer names begin with; ``head`` may be the embedding's own name."""

    prefix: str
    embedding: str
    norm: str
    head: str


def llama_names(model_dir: Path, layers: int) -> LlamaNames | None:
    """Return the names under which the files hold a whole model, or None where they do not."""
    with ExitStack() as stack:
        known = {
            name
            for path in weight_files(model_dir)
            for name in _names(stack.enter_context(safe_open(path, framework="pt")))
        }
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    head = "lm_head.weight" if "lm_head.weight" in known else embedding
    names = LlamaNames("model.layers.", embedding, norm, head)
    needed = {embedding, norm} | {
        f"{names.prefix}{i}.{part}.weight" for i in range(layers) for part in (*_LINEARS, *_NORMS)
    }
    return names if needed <= known else None


class FileWeights:
    """Reads tensors as they are asked for; each comes in ``dtype``."""

    def __init__(self, model_dir: Path, names: LlamaNames, dtype: torch.dtype) -> None:
        self._names = names
        self._dtype = dtype
        self._files = [safe_open(path, framework="pt") for path in weight_files(model_dir)]
        self._places = {name: file for file in self._files for name in _names(file)}

    def embedding(self) -> torch.Tensor:
        """Return the embedding [vocabulary, hidden]."""
        return self._tensor(self._names.embedding)

    def head(self) -> tuple[torch.Tensor, Projection]:
        """Return the final norm and the output projection."""
        return self._tensor(self._names.norm), Projection(self._tensor(self._names.head), None)

    def layer(self, index: int, window: int | None) -> LayerParts:
        """Return the weights of one decoder layer."""
        base = f"{self._names.prefix}{index}."
        q, k, v, o, gate, up, down = (self._projection(base + part) for part in _LINEARS)
        attention_norm, mlp_norm = (self._tensor(f"{base}{part}.weight") for part in _NORMS)
        return LayerParts(
            attention_norm=attention_norm,
            q=q,
            k=k,
            v=v,
            o=o,
            mlp_norm=mlp_norm,
            gate=gate,
            up=up,
            down=down,
            q_norm=self._optional(f"{base}self_attn.q_norm.weight"),
            k_norm=self._optional(f"{base}self_attn.k_norm.weight"),
            window=window,
        )

    def _projection(self, name: str) -> Projection:
        return Projection(self._tensor(f"{name}.weight"), self._optional(f"{name}.bias"))

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._tensor(name) if name in self._places else None

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._places[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor.to(self._dtype)


def _names(file: safe_open) -> list[str]:
    return list(file.keys())  # type: ignore[no-untyped-call]
