"""What a checkpoint's `quantization_config` says, as values: a file for each method, by its name."""
