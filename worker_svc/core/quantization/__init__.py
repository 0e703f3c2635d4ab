"""The `quantization_config` of a checkpoint as values: a file for each method, by its name."""
