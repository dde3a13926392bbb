"""A small classifier and images."""

from classifier_fixtures import image_dir, model, model_dir

__all__ = ["image_dir", "model", "model_dir"]
