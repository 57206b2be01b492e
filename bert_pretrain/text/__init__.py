"""Any input to documents, and documents to the ids of BERT's tokenizer."""
