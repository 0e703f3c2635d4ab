"""The frame of a service: the bus, its session, lifecycle, settings, logs, metrics and the gRPC server."""
