"""Output formats of model families: tables of markers, and the one reader that goes by them."""
