"""Bodies that come compressed: `Content-Encoding` of a request."""

import zlib

from jaxllm.server.api.errors import ApiError

# How zlib is to read it: 16 for the frame of gzip, 32 to look at the first bytes.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 32 + zlib.MAX_WBITS}
ACCEPTED = "gzip, deflate"


def decoded(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """The body as it was before it was compressed. No more than `max_bytes` of it are ever made.

    Raises ApiError: 415 for another encoding, 400 for a body that is not what it says, 413 for one that becomes too
    large.
    """
    names = [name.strip().lower() for name in encoding.split(",") if name.strip().lower() not in ("", "identity")]
    if not names:
        return body
    if len(names) > 1 or names[0] not in _WINDOW_BITS:
        message = f"Content-Encoding is {encoding[:80]!r}; it may be one of {ACCEPTED}, or be left out"
        raise ApiError(
            415,
            message,
            param="Content-Encoding",
            code="request_body_encoding_unsupported",
            headers={"accept-encoding": ACCEPTED},
        )
    parts: list[bytes] = []
    room = max_bytes
    while body:  # gzip may have several members, one after the other
        stream = zlib.decompressobj(_WINDOW_BITS[names[0]])
        try:
            part = stream.decompress(body, room + 1)
        except zlib.error as error:
            raise _broken(names[0], str(error)) from None
        if len(part) > room:
            message = f"the body has more than {max_bytes:,} bytes when it is unpacked; max_body_bytes is {max_bytes:,}"
            raise ApiError(413, message, code="request_body_too_large_after_decoding")
        if not stream.eof:
            raise _broken(names[0], "it ends too early")
        parts.append(part)
        room -= len(part)
        body = stream.unused_data
    return b"".join(parts)


def _broken(name: str, why: str) -> ApiError:
    message = f"the body is not what Content-Encoding says, {name}: {why}"
    return ApiError(400, message, param="Content-Encoding", code="request_body_encoding_invalid")
