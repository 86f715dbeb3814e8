"""What models give that answer with numbers: which they are, what their files say of it, and how it is computed."""
