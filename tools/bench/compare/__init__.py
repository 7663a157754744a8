"""Diptych beside its peers in one run, and what the ratios should be."""
