"""Tools for pretrained models: evaluate, score, fill masks, embed."""
