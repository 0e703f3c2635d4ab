"""The scheduler's domain: values in, values out."""
