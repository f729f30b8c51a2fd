"""Cut matrix products into blocks for devices."""
