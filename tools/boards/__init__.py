"""The boards for Grafana, as data: a module each, made of panels and PromQL."""
