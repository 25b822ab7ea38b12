"""From rows in files to packed micro-batches."""
