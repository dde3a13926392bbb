"""Inference on image files: classification, evaluation, engines, export and a server."""
