"""`python -m quintet` is `quintet`."""

import sys

from quintet.server.cli import main

sys.exit(main())
