"""Engine and API processes of a server: supervisor, messages, remote backend."""
