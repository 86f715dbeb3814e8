"""One module for each command of `quintet`; modules with an underscore are shared by several."""
