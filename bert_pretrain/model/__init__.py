"""The BERT model (`bert.py`), attention backends, and model folders in Hugging Face's format."""
