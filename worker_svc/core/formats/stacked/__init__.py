"""Weights of experts, as many of one shape as there are experts, in the forms that products read."""
