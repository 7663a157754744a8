"""Other engines to measure against: what they are, how to install them, how to run them."""
