"""Pictures, texts and named entities as batches."""
