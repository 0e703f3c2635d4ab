"""Benchmarks: each module measures one thing and prints it with the machine and the command that it was measured by."""
