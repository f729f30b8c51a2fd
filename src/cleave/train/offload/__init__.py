"""The bridge between autograd and a fleet: which modules are offloaded, and how they compute."""
