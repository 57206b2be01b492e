"""Uses of pretrained models: evaluate, score, fill masks, embed."""
