"""Stage 2, `make-data`: shards of training examples from raw text and a tokenizer."""
