"""Router: one address in front of several servers, with prefix-aware load balancing."""
