"""A checkpoint in the Hugging Face layout: found and read here, for each service that needs a part of it."""
