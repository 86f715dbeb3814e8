"""Images and videos as arrays, decoded in child processes with limits: the extras `image` and `video`."""
