"""States of fixed size that layers keep of sequences, and what computes them."""
