"""`encrypted_content`: a thought as opaque text, for clients that give back nothing else of it.

Nothing is encrypted, and nothing signed: the thought stands beside it in `content`, and the server keeps no key.
"""

import base64
import binascii

from quintet.sampling_params import ParameterError

_MARK = "quintet-thought-1."


def seal(text: str) -> str:
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str, where: str) -> str:
    """Raises ParameterError for what this server did not make."""
    try:
        if not sealed.startswith(_MARK):
            raise ValueError
        return base64.b64decode(sealed.removeprefix(_MARK), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise ParameterError(
            where, "was not made by this server, which cannot read it; leave the item out, or give its content"
        ) from None
