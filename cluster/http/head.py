"""Heads of HTTP requests: their size, and offers in them to upgrade the protocol."""

import httptools

_LINE_BYTES = 4
"""Bytes of a header line besides name and value."""

Headers = list[tuple[bytes, bytes]]


def size_of(headers: Headers) -> int:
    """Return the number of bytes of header lines."""
    return sum(len(name) + len(value) + _LINE_BYTES for name, value in headers)


def without_offer(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """Return the head that a parser has just read, without its offer to upgrade."""
    line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    kept = (b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade")
    return line + b"".join(kept) + b"\r\n"
