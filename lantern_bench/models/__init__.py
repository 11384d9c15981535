"""The only place that knows an architecture: transformer, drafter, tokenizer, conditioning, families, their files."""
