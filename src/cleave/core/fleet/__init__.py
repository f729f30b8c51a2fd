"""Device profiles, and fleets sampled from the fact tables."""
