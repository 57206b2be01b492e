"""Stage 1: raw text to a WordPiece vocabulary."""
