"""The ground of Penstock: the domain's values, the wire format and the version. Imports nothing else of Penstock."""

__version__ = "0.1.0"
