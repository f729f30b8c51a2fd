"""Training in PyTorch: the only package that imports torch."""
