"""What people do with models: evaluate, score, fill masks, embed."""
