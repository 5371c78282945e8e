"""Outputs of Hugging Face's `transformers` to compare with."""
