"""Acme accelerators as a platform of quintet: a whole vendor's package, on emulated devices.

The variable ACME_FAULTS makes them faulty, to try the conformance kit: names of acme.faults, with commas between.
"""

import os

from acme.platform import Acme

__all__ = ["Acme"]

if os.environ.get("ACME_FAULTS"):
    from acme.faults import inject

    inject(*os.environ["ACME_FAULTS"].split(","))
