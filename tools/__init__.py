"""What developers run: generators of code and of the bundled model."""
