"""Regular expressions that a checkpoint's configuration names modules by: only those that are matched at once."""

import functools
import re
import reprlib

LONGEST = 512  # characters
REPEATED = 6  # things that may be repeated, in one: each multiplies the time by a name's length, of some 40 characters


@functools.cache
def compiled(text: str) -> re.Pattern[str]:
    """ValueError for what is none, or could take very long: a repeated group, or many repetitions."""
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ValueError(f"quantization_config names modules by {reprlib.repr(text)}, which is no pattern of them")
    plain = re.sub(r"\\.", "_", text).removesuffix(".*")
    if re.search(r"\)[*+{]", plain) or sum(each in "*+{" for each in plain) > REPEATED:
        raise ValueError(
            f"quantization_config names modules by {reprlib.repr(text)}, which could take for ever to match: a group "
            f"is repeated, or more than {REPEATED} things are; write it as several patterns"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"quantization_config names modules by {reprlib.repr(text)}, which is no regular expression ({error})"
        ) from None
