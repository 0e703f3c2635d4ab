"""Incremental text, stop strings and ends: values in, values out."""
