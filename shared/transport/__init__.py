"""Control links over ZeroMQ and KV byte movers."""
