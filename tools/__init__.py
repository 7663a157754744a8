"""The ``diptych`` command."""
