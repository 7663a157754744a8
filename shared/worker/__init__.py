"""The scheduler and step loop that prefill, decode and mixed roles share."""
