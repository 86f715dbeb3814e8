"""Names of requests: a client's own where it is harmless in headers and logs, else one that cannot be guessed."""

import re
import secrets

HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def new_id() -> str:
    return secrets.token_hex(16)


def request_id(given: str | None) -> str:
    """What the header brought, if it is sane."""
    return given if given is not None and _SANE.fullmatch(given) else new_id()
