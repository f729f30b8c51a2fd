"""The autograd bridge between PyTorch and a fleet."""
