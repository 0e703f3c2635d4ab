"""Attention over the paged KV cache: of sequences that advance by one token, and of chunks of prompts."""
