"""Parts of several benchmarks: the machine's description, an in-process loop to compare with, services, clients."""
