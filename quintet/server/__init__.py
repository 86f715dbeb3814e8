"""What people call: the command line, and the HTTP server to come."""
