"""Diptych processes. A service never imports another service."""
