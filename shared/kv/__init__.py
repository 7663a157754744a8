"""KV blocks: layout, arena, pool with leases, hashing."""
