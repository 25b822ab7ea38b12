"""The embedded model, tokenizer and examples of `penstock train demo`."""
