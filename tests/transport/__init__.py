"""Links on real sockets."""
