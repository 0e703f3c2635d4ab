"""Decoders of transformers' own modules over paged attention, which prove themselves before their weights are read."""
