"""Fine-tuning: classification, tagging and extractive question answering."""
