"""Smaller forms of KV for the wire and the store, behind one interface."""
