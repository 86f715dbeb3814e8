"""Feeds a text in pieces, and looks at every event that comes."""

import codecs
import json
from collections.abc import Iterable

from quintet.parsers import CallArguments, CallBegin, CallEnd, Event, Parsed, StreamParser, gather


def split(splitter: StreamParser, pieces: Iterable[str]) -> list[Event]:
    """All events, which follow the rules of a stream: calls in turn, each begun, in pieces, ended; no empty text."""
    events = [event for piece in pieces for event in splitter.feed(piece)] + splitter.finish()
    begun = ended = 0
    for event in events:
        match event:
            case CallBegin(index):
                assert index == begun == ended
                begun += 1
            case CallArguments(index, text):
                assert index == begun - 1 == ended
                assert text
            case CallEnd(index):
                assert index == begun - 1 == ended
                ended += 1
            case _:
                assert event.text
    assert begun == ended
    for each in gather(events).calls:
        assert not each.complete or isinstance(json.loads(each.arguments), dict)
    return events


def whole(splitter: StreamParser, pieces: Iterable[str]) -> Parsed:
    return gather(split(splitter, pieces))


def in_bytes(text: str, size: int = 1) -> list[str]:
    """As UTF-8, so many bytes at a time: a piece is empty where it ends within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    data = text.encode()
    return [decoder.decode(data[at : at + size]) for at in range(0, len(data), size)]


def cut_in_two(text: str) -> list[list[str]]:
    """At every byte."""
    data = text.encode()
    cuts = []
    for at in range(1, len(data)):
        decoder = codecs.getincrementaldecoder("utf-8")()
        cuts.append([decoder.decode(data[:at]), decoder.decode(data[at:])])
    return cuts
