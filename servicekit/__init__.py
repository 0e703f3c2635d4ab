"""How a service runs: the bus, its session, lifecycle, settings, logs, metrics and the gRPC server."""
