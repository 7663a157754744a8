"""KV bytes over sockets: the ``host`` path between workers that do not share memory.

The reader asks (``Fetch``) and grants credit for slots it has; the prefill worker's thread
sends chunks straight out of its pool. Machines (``fetches``, ``servings``) are pure; the
threads around them are ``reader`` and ``server``.
"""
