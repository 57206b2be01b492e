"""The BERT model: one file to read (`bert.py`), attention backends, Hugging Face names."""
