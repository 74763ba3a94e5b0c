"""Shapes of secrets: tokens of known services, private keys, and values that may follow a name such as `api_key`.

Shapes of tokens are those of detect-secrets (Yelp's scanner) and our own. Ours cover the services of this field and
allow no token to begin in the middle of a word, because a base64 image contains every short sequence of letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from itertools import pairwise

from vlmrl.redaction.names import kind_of_name

HIDDEN = "<redacted>"
"""Text that replaces a secret."""
Span = tuple[int, int]

PREFIXES = r"""
    hf_ api_org_ c?sk- gsk_ r8_ npm_ nvapi- pplx- xai- tgp_v1_ fw_ wandb_v\d_ jina_ rpa_ lsv2_ KGAT_ fc- pa- tvly- e2b_
    gh[opsur]_ github_pat_ gl[a-z]{2,5}- ya29\. GOCSPX- xox[a-z]- xapp-\d- pypi-AgE dckr_pat_ ATATT3 lin_api_ PMAK-
    ntn_ figd_ glsa_ sbp_ phx_ do[oprt]_v1_ shp[a-z]{2}_ sq0[a-z]{3}- hv[bs]\. dp\.[a-z]{2,5}\. NRAK- sntry[su]_
    [sr]k_(?:live_|test_)? whsec_ SG\. AGE-SECRET-KEY-1 PRIVATE-AGE- pul- pat[A-Za-z0-9]{14}\. tskey-[a-z]+-
    pscale_(?:tkn|oauth|pw)_ rubygems_ secret_ key- vc[pikar]_ HRKU- apify_api_ sgp_ CCI[A-Z]{3}_ cf[ua]t_ bkua_
    [A-Za-z0-9]{14}\.atlasv1\. EAACEdEose0cBA amzn\.mws\. oauth2v1_
"""
"""Beginnings of tokens, each followed by at least 16 letters, digits, `_` and `-`, which look random."""
WHOLE = (
    r"(?:fm[12]_|(?:ops|glc)_eyJ|LS0tLS1CRUdJTiB(?:QUklWQVRFI|SU0EgUFJJV|FQyBQUklWQ|PUEVOU1NII|FTkNSWVBUR))[\w+/=-]{24,}",
    r"dapi[a-f0-9]{32}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    r"\$[56]\$(?:rounds=\d+\$)?[\w./]{1,16}\$[\w./]{43,86}|\$2[abxy]\$\d\d\$[\w./]{53}",
    r"\$argon2(?:id?|d)\$v=\d+\$[\w=,]+\$[\w+/]{8,}\$[\w+/]{16,}",
)
"""Patterns of tokens, and of hashes of passwords, that have other signs in them."""
PLAIN = r"A(?<![\w+/-]A)(?:Iza[\w-]{30,}|(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16})"
"""Pattern of tokens that begin like a word. They are not accepted inside base64 text."""
HOOKS = (
    r"(?:hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/"
    r"|hooks\.zapier\.com/hooks/catch/|/open-apis/bot/v2/hook/|/with/key/|api\.telegram\.org/(?:file/)?bot)"
    r"([\w:/@+-]{8,})"
)
_RUN = re.compile(r"[\w.+/=$,-]{15,}", re.ASCII)
"""Pattern of a long sequence without spaces. Tokens are long, so shorter words are not searched (for speed)."""
_TOKEN = re.compile(
    rf"(?:(?<![\w-])|(?<=\\[nrt]))(?:(?P<token>(?:{'|'.join(PREFIXES.split())})[\w-]{{16,}}(?:[.+/=][\w-]{{16,}})*[=]*)|{'|'.join(WHOLE)})",
    re.ASCII,
)
_PLAIN, _HOOK = re.compile(PLAIN, re.ASCII), re.compile(HOOKS, re.ASCII)
_HOSTS = ("hook", "/with/key/", "api.telegram.org")
_LONGEST_WORD = 15
"""Maximum number of letters of a word. A longer sequence after a service's prefix is a token."""
_PEM = re.compile(
    r"(?:-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d)"
    r"(?P<body>(?:(?!-----|Private-MAC).){0,20000})(?P<end>-----END|Private-MAC)?",
    re.DOTALL,
)
_PEM_LINE = re.compile(r"[+\- #*>]*(?P<line>[^\n]*[^\s][^\n]*)")
_PEM_BODY = re.compile(r"[+\- #*>\"'\\nrt]*[A-Za-z0-9+/=]{16,}[\\nrt\"',+ ]*")
_CAMEL_WORD = re.compile(r"[A-Z]?[a-z]{3,}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-?\d\d-?\d\d[T _-]?\d\d:?\d\d(?::?\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_NUMBER = re.compile(r"[\d._,]+(?:e[+-]?\d+)?%?", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"[*xX._?\-\s]*|<[^>]*>|\$?\{.*\}|\$[a-z_]+|\$\(.*\)|%(?:\(\w+\))?[sdr]|none|null|nil|true|false|undefined"
    r"|(?:your|insert|enter|replace|put|example|dummy|fake|todo)(?:[\W_][^\d]*|)",
    re.IGNORECASE | re.DOTALL,
)
DETECTORS = (
    "aws azure_storage_key discord github_token gitlab_token mailchimp pypi_token sendgrid slack square_oauth stripe"
    " telegram_token twilio"
)
"""Modules of detect-secrets whose shapes are used.

These are left out: those for any assignment, entropy or address (git hashes and fingerprints are no secrets here),
those whose time is quadratic in the text's length (JWT, OpenAI, npm, basic authentication: our shapes cover them), and
those that match ordinary words (Artifactory, IBM).
"""


def service_tokens(text: str) -> Iterator[Span]:
    """Yield (start, end) of every token that has a service's prefix.

    Plain words are not tokens, whatever their beginning: `sk-learn-contrib-package`.
    """
    for run in _RUN.finditer(text):
        for m in _TOKEN.finditer(text, *run.span()):
            if m["token"] is None or has_random_part(m[0]) or max(map(len, re.split(r"[\W_]+", m[0]))) > _LONGEST_WORD:
                yield m.span()
    yield from (m.span() for m in _PLAIN.finditer(text))
    if any(host in text for host in _HOSTS):
        yield from (m.span(1) for m in _HOOK.finditer(text))


@lru_cache(maxsize=1)
def scanner_shapes() -> re.Pattern[str]:
    """Return one pattern of the tokens that detect-secrets knows by their service. It is imported at the first call."""
    from detect_secrets.plugins.base import RegexBasedDetector

    modules = [vars(import_module(f"detect_secrets.plugins.{name}")).values() for name in DETECTORS.split()]
    kinds = {v for module in modules for v in module if isinstance(v, type) and issubclass(v, RegexBasedDetector)}
    kinds = sorted(kinds - {RegexBasedDetector}, key=lambda kind: kind.__name__)
    shapes: list[re.Pattern[str]] = [shape for kind in kinds for shape in kind().denylist]
    each = (f"(?i:{s.pattern})" if s.flags & re.IGNORECASE else f"(?:{s.pattern})" for s in shapes)
    return re.compile(rf"(?:(?<![A-Za-z0-9+/])|(?<=\\[nrt]))(?:{'|'.join(each)})[\w-]*", re.ASCII)


def private_keys(text: str) -> Iterator[Span]:
    """Yield the lines of private keys between the first and the last line, each as a span.

    If the last line is missing, all following lines that look like parts of the key are yielded.
    """
    for key in _PEM.finditer(text):
        for line in re.finditer(r"[^\n]+", key["body"]):
            if key["end"] is None and not _PEM_BODY.fullmatch(line[0]):
                break
            shown = len(line[0]) - len(line[0].lstrip("+- #"))
            if line[0].strip():
                yield key.start("body") + line.start() + shown, key.start("body") + line.end()


def lowered(text: str) -> str:
    """Return the text in lower case with the same length: the character that would become two becomes one."""
    return text.replace("\u0130", "I").lower()


def is_placeholder(value: str, *, names: bool = True) -> bool:
    """Return whether a value is a placeholder: `<token>`, `${TOKEN}`, `...`, or a name such as `HF_TOKEN`.

    Args:
        names: whether a name counts as a placeholder. In an address it does not: `user:password` is really sent.
    """
    if _PLACEHOLDER.fullmatch(value) or not names:
        return _PLACEHOLDER.fullmatch(value) is not None
    return re.fullmatch(r"[A-Za-z_][A-Za-z_.-]*", value) is not None and kind_of_name(value) != "none"


def is_open(value: str) -> bool:
    """Return whether a value is no secret, whatever its name: empty, a plain number, a placeholder, already hidden."""
    return not value or HIDDEN in value or _NUMBER.fullmatch(value) is not None or is_placeholder(value)


def is_mixed(value: str) -> bool:
    """Return whether a value is one word that mixes letters with digits or signs, so neither a word nor a number."""
    if len(value) < 6 or any(c.isspace() for c in value) or _NUMBER.fullmatch(value):
        return False
    return any(c.isalpha() for c in value) and any(c.isdigit() or c in "!@#$%^&*+/=~" for c in value)


def looks_random(value: str) -> bool:
    """Return whether a value looks like random characters, and not like words, numbers, dates or versions."""
    if len(value) < 12 or not re.fullmatch(r"[\w.+/=~:@!#$%^&*?-]+", value, re.ASCII) or _TIME.fullmatch(value):
        return False
    return _UUID.fullmatch(value) is not None or has_random_part(value)


def has_random_part(value: str) -> bool:
    """Return whether a sequence of letters and digits in a value looks random, however short the value is."""
    return any(_is_random_part(part) for part in re.split(r"[^A-Za-z0-9]+", value))


def _is_random_part(part: str) -> bool:
    if len(part) < 8 or part.isdigit():
        return False
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in part]
    changes = sum(a != b for a, b in pairwise(kinds))
    if part.isalpha():  # words in camel case, such as `MyClassName`, are not random
        words = sum(map(len, _CAMEL_WORD.findall(part)))
        return len(part) >= 16 and words < len(part) / 2 and changes >= 6
    # A word that begins with a capital and ends in a number has two changes of kind.
    return changes >= 3 or (len(part) >= 16 and re.fullmatch("[0-9a-f]+|[0-9A-F]+", part) is not None)
