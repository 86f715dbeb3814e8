"""Images and videos as arrays, decoded in child processes with limits on time, memory and size: the extras `image` and
`video`."""
