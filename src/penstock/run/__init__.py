"""One run from its recipe to its exported model."""
