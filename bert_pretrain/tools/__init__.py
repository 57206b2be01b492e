"""What one does with data folders and models: evaluate, fill blanks, draw curves."""
