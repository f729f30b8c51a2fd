"""Puts this folder on the path, so that the tests here and in planner/ can import `fleets` and `tilings`."""
