"""Mixtures of experts: which rows go to which experts, and products with the weights of those."""
