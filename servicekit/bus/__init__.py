"""The bus: streams, requests, sessions and leases on one Redis or Valkey server, or in memory."""
