"""Texts of tokens: what detokenizers make streams of, and tokenizers spell."""
