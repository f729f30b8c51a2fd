"""Plan matrix products: cut them into blocks and assign those to devices."""
