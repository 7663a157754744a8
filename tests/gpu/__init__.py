"""What only a GPU can show; skipped visibly where there is none. Run by ``make gpu-test``."""
