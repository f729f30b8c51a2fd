"""Plan matrix products: cut them into blocks and assign the blocks to devices."""
