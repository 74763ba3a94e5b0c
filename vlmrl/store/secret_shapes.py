"""What a secret looks like: tokens of known services, and what may stand behind a name such as `api_key`.

Shapes of tokens are those of detect-secrets (Yelp's scanner) and ours, which knows the services of this field and lets
no token begin in the middle of a word: a base64 image holds every short sequence of letters somewhere.
"""

from __future__ import annotations

import base64
import binascii
import re
from functools import lru_cache
from itertools import pairwise
from typing import Literal

HIDDEN = "<redacted>"
"""What stands in the place of a secret."""

Sure = Literal["sure", "maybe", "none"]
"""How surely a name is that of a secret: whatever it holds, only what looks random, or nothing."""

SERVICES = (
    r"hf_[A-Za-z0-9]{16,}", r"api_org_[A-Za-z0-9]{16,}", r"sk-[A-Za-z0-9_-]{16,}", r"csk-[a-z0-9]{20,}",
    r"gsk_[A-Za-z0-9]{16,}", r"r8_[A-Za-z0-9]{16,}", r"npm_[A-Za-z0-9]{16,}", r"nvapi-[\w-]{16,}",
    r"pplx-[A-Za-z0-9]{16,}", r"xai-[A-Za-z0-9]{16,}", r"tgp_v1_[\w-]{16,}", r"fw_[A-Za-z0-9]{20,}",
    r"wandb_v\d_\w{16,}", r"jina_[a-f0-9]{32}\w*", r"rpa_[A-Z0-9]{30,}\w*", r"lsv2_[a-z]{2}_[a-f0-9]{20,}\w*",
    r"KGAT_[A-Za-z0-9]{16,}", r"gh[opsur]_[A-Za-z0-9]{20,}", r"github_pat_\w{20,}", r"gl[a-z]{2,5}-[\w-]{20,}",
    r"ya29\.[\w-]{20,}", r"GOCSPX-[\w-]{16,}", r"xox[abeprs]-[\w-]{10,}", r"xapp-\d-[\w-]{10,}",
    r"pypi-AgE[\w-]{16,}", r"dckr_pat_[\w-]{16,}", r"ATATT3[\w=-]{20,}", 
    r"(?:ntn|figd|glsa|sbp|phx)_[A-Za-z0-9_-]{24,}",
    r"lin_api_[A-Za-z0-9]{16,}", r"PMAK-[a-f0-9-]{24,}", r"do[oprt]_v1_[a-f0-9]{32,}", r"shp[a-z]{2}_[a-fA-F0-9]{24,}",
    r"sq0[a-z]{3}-[\w-]{20,}", r"dapi[a-f0-9]{32}", r"hv[bs]\.[\w-]{20,}", r"dp\.[a-z]{2,5}\.[A-Za-z0-9]{32,}",
    r"NRAK-[A-Z0-9]{20,}", r"sntry[su]_[\w+/=.-]{20,}", r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}",
    r"whsec_[\w+/=-]{20,}", r"SG\.[\w-]{16,}\.[\w-]{16,}", r"AGE-SECRET-KEY-1[A-Z0-9]{40,}",
    r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*", r"pul-[a-f0-9]{40}", r"PRIVATE-AGE-[\w-]{20,}",
)  # fmt: skip
PLAIN = (r"AIza[\w-]{30,}", r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}")
"""Tokens that begin like a word: they must not be a part of base64 either."""
HOOKS = (
    r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/+-]{8,}",
    r"(?<=discord\.com/api/webhooks/)[\d]+/[\w-]{8,}", r"(?<=discordapp\.com/api/webhooks/)[\d]+/[\w-]{8,}",
    r"(?<=webhook\.office\.com/)[\w@/-]{16,}", r"(?<=/with/key/)[\w-]{8,}",
)  # fmt: skip
OURS = re.compile(rf"(?<![\w-])(?:{'|'.join(SERVICES)})|(?<![\w+/-])(?:{'|'.join(PLAIN)})|{'|'.join(HOOKS)}", re.ASCII)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SURE_WORDS = _words(
    "password passwd passphrase passcode secret apikey secretkey privatekey accesskey credential credentials"
)
SURE_PAIRS = frozenset((first, "key") for first in _words("api access private secret signing encryption master auth"))
SURE_PAIRS |= {(first, "token") for first in _words("auth access api bearer refresh")} | {("account", "key")}
MAYBE_WORDS = _words(
    "key token auth login bearer pass pw pwd pat jwt sig signature cookie session dsn webhook authorization cred creds"
    " sas"
)
OTHER_KINDS = {
    "token": _words(
        "stop eos bos pad image images special think mask sep unk cls start end vision video new max min num prompt"
        " completion first last next prev per newline begin boi eoi sampled response extra answer tool tokens"
    ),
    "key": _words(
        "cache row sort primary foreign group dict hash public partition column lookup json state metric sample prompt"
        " dedupe content object param config weight data first last left right arrow answer label image next prev"
        " idempotency candidate source map index join merge cluster"
    ),
}
"""Last word -> words before it that make it a thing that is no secret: a stop token, a cache key."""
ABOUT_IT = _words(
    "name path file dir folder url uri env var variable field column header prefix suffix regex pattern hint help label"
    " type kind len length size count id ids index limit hash sha sha1 sha256 md5 digest fingerprint checksum policy"
    " prompt question riddle word words message error required enabled valid expiry expires ttl age format placeholder"
    " manager provider store vault usage cost budget rate ratio embedding embeddings per and or is of"
)
"""Last words of names that tell something about a secret, and do not hold it."""
SUFFIXES = _words("prod dev test staging primary secondary value val str string b64 base64 raw default")
"""Last words that change nothing about a name."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-?\d\d-?\d\d[T _-]?\d\d:?\d\d(?::?\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_PLACEHOLDER = re.compile(
    r"[*xX._?\-\s]*|<[^>]*>|\$?\{.*\}|\$[a-z_]+|\$\(.*\)|%(?:\(\w+\))?[sdr]|none|null|nil|true|false|undefined"
    r"|(?:your|insert|enter|replace|put|example|dummy|fake|todo)(?:[\W_][^\d]*|)",
    re.IGNORECASE | re.DOTALL,
)


@lru_cache(maxsize=1)
def scanner_shapes() -> re.Pattern[str]:
    """One pattern of the tokens that detect-secrets knows by their service. It is imported when first asked for.

    Left out are detectors of any assignment, entropy or address (git hashes and fingerprints are none of our secrets),
    and those whose search is quadratic in the text (JWT, OpenAI, basic authentication: ours cover them) or that match
    ordinary words (Artifactory, IBM).
    """
    from detect_secrets.plugins import (
        aws,
        azure_storage_key,
        discord,
        github_token,
        gitlab_token,
        mailchimp,
        pypi_token,
        sendgrid,
        slack,
        square_oauth,
        stripe,
        telegram_token,
        twilio,
    )

    detectors = (
        aws.AWSKeyDetector, azure_storage_key.AzureStorageKeyDetector, discord.DiscordBotTokenDetector,
        github_token.GitHubTokenDetector, gitlab_token.GitLabTokenDetector, mailchimp.MailchimpDetector,
        pypi_token.PypiTokenDetector, sendgrid.SendGridDetector, slack.SlackDetector,
        square_oauth.SquareOAuthDetector, stripe.StripeDetector, telegram_token.TelegramBotTokenDetector,
        twilio.TwilioKeyDetector,
    )  # fmt: skip
    shapes: list[re.Pattern[str]] = [shape for detector in detectors for shape in detector().denylist]
    each = (f"(?i:{s.pattern})" if s.flags & re.IGNORECASE else f"(?:{s.pattern})" for s in shapes)
    return re.compile(rf"(?<![A-Za-z0-9+/])(?:{'|'.join(each)})", re.ASCII)


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name in lower case: `OPENAI_API_KEY`, `openaiApiKey`, `x-api-key2` hold api and key."""
    return tuple(word.lower() for word in _WORD.findall(name))


@lru_cache(maxsize=4096)
def kind_of_name(name: str) -> Sure:
    """Return how surely a value under this name is a secret."""
    words = list(words_of(name.rpartition(".")[2] or name))
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in SUFFIXES):
        words.pop()
    if not words:
        return "none"
    words[-1] = _singular(words[-1])
    last, before = words[-1], words[:-1]
    if last in SURE_WORDS or tuple(words[-2:]) in SURE_PAIRS:
        return "sure"
    if last in MAYBE_WORDS:
        return "none" if before and before[-1] in OTHER_KINDS.get(last, ()) else "maybe"
    if last in ABOUT_IT:
        return "none"
    pairs = pairwise(words)
    return "maybe" if SURE_WORDS.intersection(words) or SURE_PAIRS.intersection(pairs) else "none"


def is_plural(name: str) -> bool:
    """Return whether a name is that of several: `api_keys`."""
    words = words_of(name)
    return bool(words) and words[-1] != _singular(words[-1])


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and word[:-1] in SURE_WORDS | MAYBE_WORDS else word


def is_placeholder(value: str, *, names: bool = True) -> bool:
    """Return whether a value only says where one belongs: `<token>`, `${TOKEN}`, `...`, or names one: `HF_TOKEN`.

    Args: names: whether a name counts; in an address `user:password` is what is sent.
    """
    if _PLACEHOLDER.fullmatch(value) or not names:
        return _PLACEHOLDER.fullmatch(value) is not None
    named = re.fullmatch(r"[A-Za-z_][A-Za-z_.-]*", value) is not None
    return named and kind_of_name(value) != "none"


def is_number(value: str) -> bool:
    """Return whether a value is a plain number, which is never hidden."""
    return re.fullmatch(r"[\d._,]+(?:e[+-]?\d+)?%?", value, re.IGNORECASE) is not None


def is_mixed(value: str) -> bool:
    """Return whether a value is one word of letters and digits or signs: no word of a language, no number."""
    if len(value) < 6 or any(c.isspace() for c in value) or is_number(value):
        return False
    return any(c.isalpha() for c in value) and any(c.isdigit() or c in "!@#$%^&*+/=~" for c in value)


def looks_random(value: str) -> bool:
    """Return whether a value looks like drawn characters: not words, numbers, dates or versions put together."""
    if len(value) < 12 or not re.fullmatch(r"[\w.+/=~:@!#$%^&*?-]+", value, re.ASCII) or _TIME.fullmatch(value):
        return False
    if _UUID.fullmatch(value):
        return True
    return any(_is_random_part(part) for part in re.split(r"[^A-Za-z0-9]+", value))


def _is_random_part(part: str) -> bool:
    if len(part) < 8 or part.isalpha() or part.isdigit():
        return False
    if len(part) >= 16 and re.fullmatch("[0-9a-f]+|[0-9A-F]+", part):
        return True
    # A word may begin with a capital and end in a number: that is two changes of kind at most.
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in part]
    return sum(a != b for a, b in pairwise(kinds)) >= 3


def is_basic_auth(value: str) -> bool:
    """Return whether a value is the base64 of `user:password`, as the header of basic authentication holds it."""
    try:
        plain = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return False
    return ":" in plain.strip(":") and plain.isprintable()
