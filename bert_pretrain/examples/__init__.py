"""Examples, the record between making data and training: arrays, masks, Parquet shards."""
