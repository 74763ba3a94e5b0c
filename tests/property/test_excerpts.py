"""An excerpt never shows a part of a secret, wherever it is, however full of secrets the text is."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlmrl.errors import shortened
from vlmrl.redaction.redact import CUT_MARGIN, excerpt, quoted, redact_text

MOST_SHOWN = 4
"""Maximum number of consecutive characters of a secret in an excerpt."""
CHARS = string.ascii_letters + string.digits


def token(seed: int, size: int) -> str:
    """A token of a service with random characters."""
    import random

    return "hf_" + "".join(random.Random(seed).choices(CHARS, k=size))


def shown_of(secret: str, text: str) -> str:
    """The longest part of the random characters of a secret that a text shows, if it is longer than MOST_SHOWN."""
    body, size = secret[3:], MOST_SHOWN + 1
    return next((body[i : i + size] for i in range(len(body) - size + 1) if body[i : i + size] in text), "")


@settings(deadline=None, max_examples=60)
@given(
    size=st.sampled_from([34, 200, 2000, 4000]),
    before=st.integers(0, 60),
    gap=st.sampled_from([" ", "\n", ",", '", "', " and "]),
    count=st.integers(1, 800),
    most=st.integers(0, 400),
    end=st.booleans(),
)
@example(size=4000, before=11, gap=" ", count=10, most=300, end=False)
@example(size=4000, before=11, gap=" ", count=10, most=300, end=True)
def test_no_part_of_a_token_is_in_an_excerpt(size: int, before: int, gap: str, count: int, most: int, end: bool):
    count = min(count, 3 * CUT_MARGIN // size)
    secrets = [token(number, size) for number in range(count)]
    text = "word " * before + gap.join(secrets) + " word" * before
    for shown in (excerpt(text, most, end=end), redact_text(shortened(text)), quoted([text], most)):
        assert not any(shown_of(secret, shown) for secret in secrets), shown
    assert len(excerpt(text, most, end=end)) <= most


@pytest.mark.parametrize("value", [pytest.param(10**5000, id="huge"), {"a": {1: ["x" * 500]}}, "\0" * 300, [[]] * 300])
def test_any_value_is_quoted(value: object):
    assert len(quoted(value)) <= 80
