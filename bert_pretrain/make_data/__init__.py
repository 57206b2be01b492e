"""Stage 2: raw text and a tokenizer to shards of sentence-pair examples."""
