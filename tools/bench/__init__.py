"""Measure a deployment the way its users see it: over HTTP, streaming."""
