"""Kinds of media. A module of its own: settings name them, and import no numpy."""

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
KINDS = (IMAGE, VIDEO, AUDIO)
