"""The fixed set of programs a device can run. Nothing a server sends is ever executed as code."""
