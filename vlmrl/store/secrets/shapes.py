"""Shapes of secrets: tokens of known services, and values that may follow a name such as `api_key`.

Shapes of tokens are those of detect-secrets (Yelp's scanner) and our own. Ours cover the services of this field and
allow no token to begin in the middle of a word, because a base64 image contains every short sequence of letters.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from vlmrl.store.secrets.names import kind_of_name

HIDDEN = "<redacted>"
"""Text that replaces a secret."""

SERVICES = (
    r"hf_[A-Za-z0-9]{16,}",
    r"api_org_[A-Za-z0-9]{16,}",
    r"sk-[A-Za-z0-9_-]{16,}",
    r"csk-[a-z0-9]{20,}",
    r"gsk_[A-Za-z0-9]{16,}",
    r"r8_[A-Za-z0-9]{16,}",
    r"npm_[A-Za-z0-9]{16,}",
    r"nvapi-[\w-]{16,}",
    r"pplx-[A-Za-z0-9]{16,}",
    r"xai-[A-Za-z0-9]{16,}",
    r"tgp_v1_[\w-]{16,}",
    r"fw_[A-Za-z0-9]{20,}",
    r"wandb_v\d_\w{16,}",
    r"jina_[a-f0-9]{32}\w*",
    r"rpa_[A-Z0-9]{30,}\w*",
    r"lsv2_[a-z]{2}_[a-f0-9]{20,}\w*",
    r"KGAT_[A-Za-z0-9]{16,}",
    r"gh[opsur]_[A-Za-z0-9]{20,}",
    r"github_pat_\w{20,}",
    r"gl[a-z]{2,5}-[\w-]{20,}",
    r"ya29\.[\w-]{20,}",
    r"GOCSPX-[\w-]{16,}",
    r"xox[abeprs]-[\w-]{10,}",
    r"xapp-\d-[\w-]{10,}",
    r"pypi-AgE[\w-]{16,}",
    r"dckr_pat_[\w-]{16,}",
    r"ATATT3[\w=-]{20,}",
    r"(?:ntn|figd|glsa|sbp|phx)_[A-Za-z0-9_-]{24,}",
    r"lin_api_[A-Za-z0-9]{16,}",
    r"PMAK-[a-f0-9-]{24,}",
    r"do[oprt]_v1_[a-f0-9]{32,}",
    r"shp[a-z]{2}_[a-fA-F0-9]{24,}",
    r"sq0[a-z]{3}-[\w-]{20,}",
    r"dapi[a-f0-9]{32}",
    r"hv[bs]\.[\w-]{20,}",
    r"dp\.[a-z]{2,5}\.[A-Za-z0-9]{32,}",
    r"NRAK-[A-Z0-9]{20,}",
    r"sntry[su]_[\w+/=.-]{20,}",
    r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}",
    r"whsec_[\w+/=-]{20,}",
    r"SG\.[\w-]{16,}\.[\w-]{16,}",
    r"AGE-SECRET-KEY-1[A-Z0-9]{40,}",
    r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    r"pul-[a-f0-9]{40}",
    r"PRIVATE-AGE-[\w-]{20,}",
    r"pat[A-Za-z0-9]{14}\.[a-f0-9]{60,}",
    r"tskey-[a-z]+-[\w-]{16,}",
    r"pscale_(?:tkn|oauth|pw)_[\w.=-]{24,}",
    r"rubygems_[a-f0-9]{40,}",
    r"secret_[A-Za-z0-9]{40,}",
    r"key-[a-f0-9]{32}",
    r"vc[pikar]_[A-Za-z0-9]{24,}",
    r"tvly-[\w-]{20,}",
    r"e2b_[a-f0-9]{32,}",
    r"HRKU-[\w-]{30,}",
    r"apify_api_[A-Za-z0-9]{24,}",
    r"(?:ops|glc)_eyJ[\w+/=-]{32,}",
    r"sgp_(?:[a-f0-9]{16}_|local_)?[a-f0-9]{40}",
    r"CCI[A-Z]{3}_\w{40,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{48,}",
    r"sk_[a-f0-9]{40,}",
    r"fc-[a-f0-9]{32}",
    r"pa-[A-Za-z0-9_-]{40,}",
    r"fm[12]_[\w+/=]{60,}",
    r"cf[ua]t_[A-Za-z0-9_-]{32,}",
    r"bkua_[a-f0-9]{40}",
    r"EAACEdEose0cBA\w{8,}",
    r"amzn\.mws\.[\w-]{30,}",
    r"oauth2v1_\w{40,}",
    r"\$[56]\$(?:rounds=\d+\$)?[\w./]{1,16}\$[\w./]{43,86}",
    r"\$2[abxy]\$\d\d\$[\w./]{53}",
    r"\$argon2(?:id?|d)\$v=\d+\$[\w=,]+\$[\w+/]{8,}\$[\w+/]{16,}",
    r"LS0tLS1CRUdJTiB(?:QUklWQVRFI|SU0EgUFJJV|FQyBQUklWQ|PUEVOU1NII|FTkNSWVBUR)[\w+/=]{24,}",
)
PLAIN = (r"AIza[\w-]{30,}", r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}")
"""Patterns of tokens that begin like a word. They are not accepted inside base64 text."""
HOOKS = (
    r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/+-]{8,}",
    r"(?<=discord\.com/api/webhooks/)[\d]+/[\w-]{8,}",
    r"(?<=discordapp\.com/api/webhooks/)[\d]+/[\w-]{8,}",
    r"(?<=webhook\.office\.com/)[\w@/-]{16,}",
    r"(?<=/with/key/)[\w-]{8,}",
    r"(?<=api\.telegram\.org/bot)\d+:[\w-]{8,}",
    r"(?<=api\.telegram\.org/file/bot)\d+:[\w-]{8,}",
    r"(?<=hooks\.zapier\.com/hooks/catch/)[\w/-]{8,}",
    r"(?<=/open-apis/bot/v2/hook/)[\w-]{8,}",
)
_RUN = re.compile(r"[\w.+/=$,-]{15,}", re.ASCII)
"""Pattern of a long sequence without spaces. Tokens are long, so shorter words are not searched (for speed)."""
_SERVICE = re.compile(rf"(?<![\w-])(?:{'|'.join(SERVICES)})", re.ASCII)
_PLAIN = re.compile(rf"A(?<![\w+/-]A)(?:{'|'.join(shape.replace('A', '', 1) for shape in PLAIN)})", re.ASCII)
_HOOK = re.compile("|".join(HOOKS), re.ASCII)
_HOSTS = ("hooks.", "discord", "webhook", "/with/key/", "api.telegram.org", "/v2/hook/")
_PLAIN_WORD = re.compile(r"[A-Z]?[a-z]*\d{0,2}|[A-Z]*\d{0,2}|\d{1,4}[A-Za-z]?")
_LONGEST_WORD = 15
"""Maximum number of letters of a word. A longer sequence after a service's prefix is a token."""
_CAMEL_WORD = re.compile(r"[A-Z]?[a-z]{3,}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-?\d\d-?\d\d[T _-]?\d\d:?\d\d(?::?\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_PLACEHOLDER = re.compile(
    r"[*xX._?\-\s]*|<[^>]*>|\$?\{.*\}|\$[a-z_]+|\$\(.*\)|%(?:\(\w+\))?[sdr]|none|null|nil|true|false|undefined"
    r"|(?:your|insert|enter|replace|put|example|dummy|fake|todo)(?:[\W_][^\d]*|)",
    re.IGNORECASE | re.DOTALL,
)


def service_tokens(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every token that has a service's prefix.

    Plain words are not tokens, whatever their beginning: `sk-learn-contrib-package`.
    """
    for run in _RUN.finditer(text):
        for m in _SERVICE.finditer(text, *run.span()):
            words = re.split(r"[^A-Za-z0-9]+", m[0])
            if not all(len(word) <= _LONGEST_WORD and _PLAIN_WORD.fullmatch(word) for word in words):
                yield m.span()
    for shape in (_PLAIN, *([_HOOK] if any(host in text for host in _HOSTS) else [])):
        yield from (m.span() for m in shape.finditer(text))


def lowered(text: str) -> str:
    """Return the text in lower case with the same length: the character that would become two becomes one."""
    return text.replace("\u0130", "I").lower()


@lru_cache(maxsize=1)
def scanner_shapes() -> re.Pattern[str]:
    """Return one pattern of the tokens that detect-secrets knows by their service. It is imported at the first call.

    These detectors are left out: those for any assignment, entropy or address (git hashes and fingerprints are no
    secrets here), those whose time is quadratic in the text's length (JWT, OpenAI, basic authentication: our shapes
    cover them), and those that match ordinary words (Artifactory, IBM).
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
        aws.AWSKeyDetector,
        azure_storage_key.AzureStorageKeyDetector,
        discord.DiscordBotTokenDetector,
        github_token.GitHubTokenDetector,
        gitlab_token.GitLabTokenDetector,
        mailchimp.MailchimpDetector,
        pypi_token.PypiTokenDetector,
        sendgrid.SendGridDetector,
        slack.SlackDetector,
        square_oauth.SquareOAuthDetector,
        stripe.StripeDetector,
        telegram_token.TelegramBotTokenDetector,
        twilio.TwilioKeyDetector,
    )
    shapes: list[re.Pattern[str]] = [shape for detector in detectors for shape in detector().denylist]
    each = (f"(?i:{s.pattern})" if s.flags & re.IGNORECASE else f"(?:{s.pattern})" for s in shapes)
    return re.compile(rf"(?<![A-Za-z0-9+/])(?:{'|'.join(each)})", re.ASCII)


def is_placeholder(value: str, *, names: bool = True) -> bool:
    """Return whether a value is a placeholder: `<token>`, `${TOKEN}`, `...`, or a name such as `HF_TOKEN`.

    Args:
        names: whether a name counts as a placeholder. In an address it does not: `user:password` is really sent.
    """
    if _PLACEHOLDER.fullmatch(value) or not names:
        return _PLACEHOLDER.fullmatch(value) is not None
    named = re.fullmatch(r"[A-Za-z_][A-Za-z_.-]*", value) is not None
    return named and kind_of_name(value) != "none"


def is_number(value: str) -> bool:
    """Return whether a value is a plain number, which is never hidden."""
    return re.fullmatch(r"[\d._,]+(?:e[+-]?\d+)?%?", value, re.IGNORECASE) is not None


def is_mixed(value: str) -> bool:
    """Return whether a value is one word that mixes letters with digits or signs, so neither a word nor a number."""
    if len(value) < 6 or any(c.isspace() for c in value) or is_number(value):
        return False
    return any(c.isalpha() for c in value) and any(c.isdigit() or c in "!@#$%^&*+/=~" for c in value)


def looks_random(value: str) -> bool:
    """Return whether a value looks like random characters, and not like words, numbers, dates or versions."""
    if len(value) < 12 or not re.fullmatch(r"[\w.+/=~:@!#$%^&*?-]+", value, re.ASCII) or _TIME.fullmatch(value):
        return False
    if _UUID.fullmatch(value):
        return True
    return has_random_part(value)


def has_random_part(value: str) -> bool:
    """Return whether a sequence of letters and digits in a value looks random, however short the value is."""
    return any(_is_random_part(part) for part in re.split(r"[^A-Za-z0-9]+", value))


def _is_random_part(part: str) -> bool:
    if len(part) < 8 or part.isdigit():
        return False
    if part.isalpha():  # words in camel case, such as `MyClassName`, are not random
        words = sum(map(len, _CAMEL_WORD.findall(part)))
        return len(part) >= 16 and words < len(part) / 2 and _changes(part) >= 6
    if len(part) >= 16 and re.fullmatch("[0-9a-f]+|[0-9A-F]+", part):
        return True
    # A word that begins with a capital and ends in a number has two changes of kind.
    return _changes(part) >= 3


def _changes(part: str) -> int:
    """Return the number of changes between digits, capitals and small letters in a value."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in part]
    return sum(a != b for a, b in pairwise(kinds))


def is_basic_auth(value: str) -> bool:
    """Return whether a value is the base64 of `user:password`, as in the header of basic authentication."""
    try:
        plain = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return False
    return ":" in plain.strip(":") and plain.isprintable()
