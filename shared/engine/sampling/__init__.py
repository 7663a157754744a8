"""From a row of logits to a token: pure in (logits, request, output index)."""
