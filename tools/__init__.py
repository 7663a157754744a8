"""The ``diptych`` command: start, watch, check and measure a deployment."""
