"""Inference on files: classification, engines, export and a server."""
