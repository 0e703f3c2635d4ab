"""Tools of developers: generators of code and of the bundled model."""
