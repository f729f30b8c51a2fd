"""Verify results: projection checks of products, recomputation of everything else, trust in devices."""
