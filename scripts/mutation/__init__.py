"""Small faults in Python and C++ sources, and the runs of tests that have to notice them."""
