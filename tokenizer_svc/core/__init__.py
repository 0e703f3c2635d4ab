"""Vocabulary, chat templates and the checks of a prompt: values in, values out."""
