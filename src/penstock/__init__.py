"""Full-parameter fine-tuning of language models that do not fit their GPU."""

__version__ = "0.1.0"
