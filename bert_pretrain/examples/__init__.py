"""Training examples: arrays in memory, masked language modelling, and Parquet shards on disk."""
