"""Names of requests: a client's own where it is harmless in headers and logs, else one that cannot be guessed."""

import re
import secrets

HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def new_id() -> str:
    return secrets.token_hex(16)


def is_valid_id(given: str) -> bool:
    """True if it can be a request's name: 1 to 128 letters, digits and ._:- that begin with a letter or a digit."""
    return _SANE.fullmatch(given) is not None
