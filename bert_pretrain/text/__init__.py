"""Reading documents from inputs of any format, and tokenizing them."""
