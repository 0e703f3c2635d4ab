"""The gateway's domain: bodies to requests, text rows to replies, values in and values out."""
