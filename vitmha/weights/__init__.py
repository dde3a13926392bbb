"""Weights of models: loading from any source, saving, and conversion."""
