"""Expert-parallel load balancing (EPLB): measures expert load, plans placements, moves experts."""
