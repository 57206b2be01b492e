"""Stage 3: shards to a trained model."""
