"""Engines measured without a server around them, in turns on the same cores."""
