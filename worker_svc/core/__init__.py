"""The worker's domain: values in, values out. Importing this package does not import torch."""
