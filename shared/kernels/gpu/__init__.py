"""Attention and KV writes for GPUs, over the same pools and batches as the CPU's kernels."""
