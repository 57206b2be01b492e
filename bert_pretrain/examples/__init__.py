"""Training examples: arrays in memory, masked language modeling, and Parquet shards on disk."""
