"""The state of sequences on the device: read into the inputs of a step, written by the host and by steps."""
