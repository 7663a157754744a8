"""The decode process."""
