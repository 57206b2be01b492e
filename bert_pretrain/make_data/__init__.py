"""Stage 2: raw text and a tokenizer to shards of examples."""
