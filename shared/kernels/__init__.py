"""Compute kernels: native operators built from ``kernels/*.cpp``, and the same in plain torch."""
