"""Building blocks of the models, sharded over tensor-parallel ranks."""
