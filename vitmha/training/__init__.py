"""Training with PyTorch Lightning."""
