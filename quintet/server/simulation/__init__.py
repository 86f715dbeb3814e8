"""A fleet of engines in virtual time: the real scheduler and router, with steps that take what was measured."""
