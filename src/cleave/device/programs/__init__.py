"""The fixed set of programs a device runs; nothing a server sends is executed as code."""
