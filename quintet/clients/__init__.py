"""HTTP clients that commands use: load generator, batch files, remote engine."""
