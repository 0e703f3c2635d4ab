"""Structural tags: parts of an output that are free and parts of a form, by xgrammar's names, as a grammar."""
