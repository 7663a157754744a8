"""The prefill process."""
