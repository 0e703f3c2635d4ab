"""The edge: OpenAI's HTTP API and `penstock.v1.Inference` over gRPC."""
