"""Benchmarks that come with the package: of a server with OpenAI's API, and of `LLM` in this process."""
