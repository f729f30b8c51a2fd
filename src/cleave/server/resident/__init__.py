"""A batch through layers that stay on devices: units out, activations and gradients in."""
