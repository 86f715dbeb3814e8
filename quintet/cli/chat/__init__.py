"""Terminal conversation of `quintet chat`, and the tools that it runs."""
