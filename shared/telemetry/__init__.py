"""Metrics and per-request timelines."""
