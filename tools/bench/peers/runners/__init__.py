"""Runs inside a peer's own environment: standard library and the peer only, nothing of ours."""
