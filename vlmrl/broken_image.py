"""Errors of a decoder of images."""

import struct
import zlib

BROKEN_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises for a damaged or hostile file."""
