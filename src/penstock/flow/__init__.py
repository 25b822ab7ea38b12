"""Bytes that move: host memory, lanes, transfers and slots. Knows no optimizer and no model."""
