"""Client of Diptych over ZeroMQ."""
