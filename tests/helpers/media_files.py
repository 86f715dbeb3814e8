"""Media for tests: files of all kinds, a processor of placeholders, and hosts of the test's own."""

import base64
import contextlib
import hashlib
import io
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from quintet.media.items import DecodedMedia, MediaItem, ProcessedPrompt, WireArray
from tests.server.fakes import bundled_tokenizer

PLACEHOLDER = "<media>"
ROWS = 4  # of each item of PlaceholderProcessor
MARK_ID = 5  # the token in the places of its rows


def picture_file(form: str = "PNG", size: tuple[int, int] = (6, 4), mode: str = "RGB", **options: Any) -> bytes:
    """Returns the file of an image with a gradient."""
    width, height = size
    values = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) * 7 % 256
    image = Image.fromarray(values.astype(np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """Returns a PNG whose header says so many pixels."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\2\0\0\0"
    body = b"IDAT" + zlib.compress(b"\0" * 10_000)
    chunks = [len(each[4:]).to_bytes(4, "big") + each + zlib.crc32(each).to_bytes(4, "big") for each in (header, body)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """Returns the data: URL of a file."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


@dataclass
class PlaceholderProcessor:
    """Puts ROWS tokens in the place of each PLACEHOLDER, and notes what it was given."""

    calls: list[tuple[Any, list[DecodedMedia], dict[str, Any]]] = field(default_factory=list)

    def process(
        self, prompt: str | Sequence[int], media: Sequence[DecodedMedia], options: Mapping[str, Any]
    ) -> ProcessedPrompt:
        """See MediaProcessor."""
        self.calls.append((prompt, list(media), dict(options)))
        if not isinstance(prompt, str):
            raise ValueError("token ids are not taken")
        texts = prompt.split(PLACEHOLDER)
        if len(texts) != len(media) + 1:
            raise ValueError(f"the prompt has {len(texts) - 1} placeholders for {len(media)} items")
        ids = list(bundled_tokenizer().encode(texts[0], add_special_tokens=False))
        items = []
        for each, text in zip(media, texts[1:], strict=True):
            digest = hashlib.blake2b(each.kind.encode() + each.data.tobytes(), digest_size=16).digest()
            span = (len(ids), len(ids) + ROWS)
            items.append(MediaItem(each.kind, digest, {"pixels": WireArray.of(each.data)}, (span,)))
            ids += [MARK_ID] * ROWS + bundled_tokenizer().encode(text, add_special_tokens=False)
        return ProcessedPrompt(ids, items)


@dataclass
class Host:
    """An HTTP server of a test, which answers with raw bytes."""

    port: int
    requests: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def http_host(answer: Callable[[bytes], Sequence[bytes]]) -> Iterator[Host]:
    """Serves on loopback: `answer` returns the pieces of the response to a request's head."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        host = Host(listener.getsockname()[1])

        def serve() -> None:
            while True:
                try:
                    wire, _ = listener.accept()
                except OSError:
                    return
                with wire, contextlib.suppress(OSError):
                    head = b""
                    while not head.endswith(b"\r\n\r\n") and (piece := wire.recv(4096)):
                        head += piece
                    host.requests.append(head)
                    for part in answer(head):
                        wire.sendall(part)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield host
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(10)


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """Returns a whole HTTP response."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "Content_Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body
