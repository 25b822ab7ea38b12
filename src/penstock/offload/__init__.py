"""Optimizer state that lives where there is room, and moves under the arithmetic."""
