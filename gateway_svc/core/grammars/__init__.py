"""Grammars in Lark's syntax of outputs that call functions."""
