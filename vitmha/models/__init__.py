"""Vision Transformers: configuration, layers, encoder, encoder-decoder, and their cost."""
