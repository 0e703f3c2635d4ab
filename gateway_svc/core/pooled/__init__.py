"""The APIs whose replies are made of vectors: embeddings, pooling, scores and rankings."""
