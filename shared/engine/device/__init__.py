"""Steps of transformers' layers on a device that has memory of its own."""
