"""`encrypted_content`: reasoning as opaque text, for clients that send back no other field of it.

It is neither encrypted nor signed: `content` has the same text, and the server keeps no key.
"""

import base64
import binascii

from quintet.sampling_params import ParameterError

_PREFIX = "quintet-thought-1."


def seal(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str, where: str) -> str:
    """Decodes seal()'s text. Raises ParameterError for other text."""
    try:
        if not sealed.startswith(_PREFIX):
            raise ValueError
        return base64.b64decode(sealed.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise ParameterError(
            where, "was not made by this server, which cannot read it; leave the item out, or give its content"
        ) from None
