"""The words that all services share: values only, no IO, nothing heavier than NumPy."""
