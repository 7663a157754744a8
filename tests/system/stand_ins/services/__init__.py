"""Stand-ins for the real services: same process contract, no model, start in milliseconds."""
