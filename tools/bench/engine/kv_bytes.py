"""How much KV a model has, from its config alone."""

from pathlib import Path

from shared.engine.weights import read_config


def kv_token_bytes(model_dir: Path, element: int = 2) -> int:
    """Return the bytes of one token's KV over all layers; ``element``: bytes of a number."""
    config = read_config(model_dir)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * element * config["num_hidden_layers"] * heads * size)
