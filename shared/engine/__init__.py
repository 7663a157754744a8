"""Model loading and checks, paged attention, steps, sampling."""
