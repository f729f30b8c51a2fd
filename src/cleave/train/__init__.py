"""Training in PyTorch, in the only package that requires torch."""
