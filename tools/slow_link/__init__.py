"""A link with a rate, a delay and loss between two network namespaces, for tests and benchmarks.

Packets pass through a process of ours, between two TUN devices: the kernel's own netem is a
module that many machines lack.
"""
