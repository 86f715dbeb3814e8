"""Errors of media that callers give."""


class MediaError(ValueError):
    """A picture, video or recording that cannot be used: what is wrong with it, and what to do.

    `where`: its place in the request, such as messages[0].content[1]; "" if the caller knows it.
    """

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(problem)
        self.where = where


class MediaPackageMissing(MediaError):
    """A package that decodes the medium is not installed; the text has the command that installs it."""
