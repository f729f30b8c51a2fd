"""A study: a grid of settings, what each system makes of them, and the figures and claims that follow. Pure."""
