"""What the benchmarks share: the machine's description, an in-process loop to compare with, services, clients."""
