"""One matrix product on a fleet: blocks out, verified rectangles in."""
