"""Check machine and deployment before anything starts, and say what to do."""
