"""Other ways to do a step: products over the fleet, and the arrangements of known systems as their users run them."""
