"""Products with a weight, by how many rows there are, and what stands around them: norms and the gate."""
