"""What a precision costs in quality, against fp32 on a text of our own."""
