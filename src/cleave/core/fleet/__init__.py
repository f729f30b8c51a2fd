"""Device profiles, and fleets drawn from the fact tables."""
