"""Wire messages, one file per link."""
