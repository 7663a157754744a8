"""Code that more than one Diptych process uses. Never imports ``services``."""
