"""Recognition of secrets: by their names, by their shapes, and by the places where they are.

Names: `openaiApiKey` is split into openai, api, key; `PGPASSWORD` into pg, password. The short endings key, pass, pwd
and pw are split off only after words that often precede them in names of secrets (`dbpass`, `sshkey`), because
`monkey`, `compass` and `hotkey` have these endings, too. Shapes of tokens are those of detect-secrets (Yelp's scanner)
and our own; ours allow no token to begin in the middle of a word, because a base64 image contains every short sequence
of letters. Places are addresses, cookies, commands, and the value after a secret's name. No language is parsed: the
search ends where the statement ends, as far as brackets, commas and line ends show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Literal

Sure = Literal["sure", "maybe", "none"]
"""Probability that a name is that of a secret.

sure: any value is hidden. maybe: only a value that looks random is hidden. none: no value is hidden.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SURE_WORDS = _words(
    "password passwd passphrase passcode pwd pw secret apikey secretkey privatekey accesskey credential credentials"
    " mnemonic"
)
MAYBE_WORDS = _words(
    "key token auth login bearer pass pat jwt sig signature cookie session dsn webhook authorization cred creds sas"
)
"""Words in names of passwords, but also of other values (a folder, weights of parts).

A short value under such a name is hidden only if it is not a word.
"""
SYSTEMS = _words(
    "db database user usr admin root smtp imap mail email ftp sftp ssh mysql sql pg pgsql postgres postgresql mariadb"
    " redis rabbit rabbitmq mq amqp mqtt kafka mongo mongodb oracle elastic es proxy ldap bind vpn wifi http https"
    " server remote login sudo svc service account acct client keystore truststore cert pfx ssl tls registry docker git"
    " github gitlab jenkins samba smb rpc api app web"
)
"""Words after which `pass` means a password."""
KEY_OWNERS = SYSTEMS | _words(
    "access private secret signing encryption master auth license licence deploy storage session host bot judge wandb"
    " openai anthropic hf huggingface gemini google azure aws cohere mistral groq together stripe"
)
SURE_PAIR = re.compile(
    r"\b(?:(?:api|access|private|secret|signing|encryption|master|auth|account) key|(?:auth|access|api|bearer|refresh)"
    rf" token|(?:{'|'.join(sorted(SYSTEMS))}) pass)\b"
)
ENDING = re.compile(
    r"(\w+)(password|passphrase|passcode|passwd|secret|token|apikey|credential)"
    rf"|({'|'.join(sorted(KEY_OWNERS))})(key)|({'|'.join(sorted(SYSTEMS))})(pass|pwd|pw)"
)
"""Endings that are split off: the first ones after any word, key and pass only after words that own one."""
OTHER_KINDS = {
    "token": _words(
        "stop eos bos pad image images special think mask sep unk cls start end vision video new max min num prompt"
        " completion first last next prev per newline begin boi eoi sampled response extra answer tool tokens sub"
    ),
    "key": _words(
        "cache row sort primary foreign group dict hash public partition column lookup json state metric sample prompt"
        " dedupe content object param config weight data first last left right arrow answer label image next prev"
        " idempotency candidate source map index join merge cluster"
    ),
}
"""Last word -> words before it that make the name harmless, such as a stop token or a cache key."""
ABOUT_IT = _words(
    "name path file dir folder url uri env var variable field column header prefix suffix regex pattern hint help label"
    " type kind len length size count id ids index limit hash sha sha1 sha256 md5 digest fingerprint checksum policy"
    " prompt question riddle word words message error required enabled valid expiry expires ttl age format placeholder"
    " manager provider store vault usage cost budget rate ratio embedding embeddings per and or is of"
)
"""Last words of names whose value describes a secret but is not the secret."""
SUFFIXES = _words("prod dev test staging primary secondary value val str string b64 base64 raw default")
"""Last words that do not change the meaning of a name."""
_NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words_of(name: str) -> list[str]:
    """Return the words of a name: singular, lower case, without SUFFIXES (`OPENAI_API_KEYS_2` -> openai, api, key)."""
    words: list[str] = []
    for word in map(str.lower, _NAME_PART.findall(name.rpartition(".")[2] or name)):
        one = word[:-1] if word.endswith("s") and not word.endswith(("ss", "sas")) else word
        split = None if one in SURE_WORDS | MAYBE_WORDS else ENDING.fullmatch(one)
        words += [part for part in split.groups() if part] if split else [one if one in _SINGULAR else word]
    if words[-2:] == ["key", "data"]:  # `key-data` in Kubernetes configurations
        words.pop()
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in SUFFIXES):
        words.pop()
    return words


_SINGULAR = SURE_WORDS | MAYBE_WORDS


@lru_cache(maxsize=4096)
def kind_of_name(name: str) -> Sure:
    """Return how likely it is that a value with this name is a secret."""
    words = words_of(name)
    last, before = (["", "", *words])[-1], (["", "", *words])[-2]
    pair = SURE_PAIR.search(" ".join(words))
    if last in SURE_WORDS or (pair and pair.end() == len(" ".join(words))):
        return "sure"
    if last in MAYBE_WORDS:
        return "none" if before in OTHER_KINDS.get(last, ()) else "maybe"
    if last in ABOUT_IT:
        return "none"
    return "maybe" if pair or not SURE_WORDS.isdisjoint(words) else "none"


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


USERINFO = re.compile(r"(?<=://)([^/\s:@\"'<>]*):([^/\s\"'<>]+)(?=@)|(?<=://)([^/\s:@\"'<>]{12,})(?=@)")
_IN_ADDRESS = frozenset(("token", "sig", "signature", "auth", "jwt", "sas", "session"))
"""Last words of parameters of addresses whose values are hidden even if they are words."""
_COOKIE = re.compile(r"[\w.$-]{1,80}=([^\s;,]{8,})")
_WORD = r"[\"']?([^\s\"'|;&<>]{3,})"
_TOOLS = (
    "sshpass", "mysql", "mariadb", "mycli", "login", "7z", "rar", "zip", "sqlcmd", "bcp", "openssl", "redis-cli",
    "htpasswd",
)  # fmt: skip


def _written(value: str) -> bool:
    """Return whether a word of a command is a secret, and not an option, a variable or a placeholder for one."""
    return not is_open(value) and value[0] not in "$-%{<"


_PLACES: tuple[tuple[tuple[str, ...], re.Pattern[str], Callable[[str], bool]], ...] = (
    (
        ("authorization",),
        re.compile(r"authorization\\?[\"']?\s*[:=,]\s*\\?[frb]?[\"']?(?:[a-z][\w-]{2,20}[ ]+)([^\s\"',;\\]{6,})"),
        lambda value: not is_placeholder(value) and "{" not in value,
    ),
    (
        ("sid=", "sessid=", "sessionid", "csrf", "xsrf", "?code", "&code", "state=", "nonce="),
        re.compile(
            r"(?:\b(?:j?sessionid|phpsessid|aspsessionid\w*|asp\.net_sessionid|connect\.sid|sid|[cx]srf[\w-]{0,20})"
            r"|[?&](?:code|state|nonce))=([\w.%:+/=-]{8,})"
        ),
        looks_random,
    ),
    (
        ("-u ", "-u=", "--user", "--proxy-user"),
        re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"'{}$<]+:([^\s\"'{}$<]+)"),
        lambda value: is_mixed(value) and not is_placeholder(value),
    ),
    (
        ("machine ", "default "),
        re.compile(
            r"\b(?:machine\s+\S+|default)[\s#*+>-]+(?:(?:login|account)\s+\S+[\s#*+>-]+)+password\s+(\S+)"
            r"|\bmachine\s+\S+\.\S+\s+password\s+(\S+)"
        ),
        lambda value: not is_placeholder(value),
    ),
    (("@//",), re.compile(r"(?<![\w/])\w{1,60}/([^\s/@\"']{3,80})@//[\w.-]+"), is_mixed),
    (
        _TOOLS,
        re.compile(
            rf"\b(?:sshpass[ ]+-p[ ]*{_WORD}|htpasswd[ ]-\w*b\w*[ ]\S+[ ]\S+[ ]{_WORD}"
            r"|(?:(?:mysql|mariadb)[\w-]*|mycli|7za?|rar|unrar|zip|unzip|sqlcmd|bcp|openssl|redis-cli"
            r"|(?:docker|podman|nerdctl|buildah|skopeo|helm|az|oc|cf)[ ][^\n|;&]{0,80}?\blogin)\b"
            rf"[^\n|;&<]{{0,200}}?[ ]-(?:p[ =]?|[ka][ ]){_WORD}"
            rf"|echo[ ]+(?:-n[ ]+)?{_WORD}(?=[ ]*\|[^\n]{{0,120}}?--password-stdin))"
        ),
        _written,
    ),
)
"""(words of which one is in the text, for speed; pattern for texts in lower case; what its last group must fulfil)."""


def addresses(text: str) -> Iterator[Span]:
    """Yield the spans of users and passwords in addresses."""
    for m in USERINFO.finditer(text) if "://" in text else ():
        if (m[3] and looks_random(m[3])) or (m[2] and not is_placeholder(m[2], names=False)):
            yield m.span()


def known_places(text: str) -> Iterator[Span]:
    """Yield the secrets of headers, cookies and command lines."""
    low = lowered(text)
    for needles, shape, fits in _PLACES:
        for m in shape.finditer(low) if any(needle in low for needle in needles) else ():
            start, end = m.span(m.lastindex or 0)
            if fits(text[start:end]):
                yield start, end
    for line in re.finditer(r"cookie\\?[\"']?[ ]*[:=,][ ]*\\?[\"']?([^\n\"'\\]{8,4000})", low):
        yield from (m.span(1) for m in _COOKIE.finditer(text, *line.span(1)) if looks_random(m[1]))


MOST_NAME_CHARS = 80
MOST_LIST_CHARS, MOST_STATEMENT_CHARS = 4000, 400
"""Maximum number of characters behind a name that are looked at: of a list, and of any other statement."""
MOST_DEPTH = 6
MOST_WORDS, MOST_PHRASE_WORDS = 4, 24
"""Maximum number of words of a quoted password, and of a passphrase. A longer value is prose about a password."""
_NAME_WORD = re.compile(
    r"key|token|secret|passw|passphrase|passcode|pwd|pass|pw|cred|auth|login|bearer|basic|pat|jwt|sig|cookie|session|dsn"
    r"|webhook|sas|mnemonic"
)
"""Pattern of words in names of secrets, for texts in lower case."""
_LEFT, _RIGHT = re.compile(r"[\w.-]*\Z", re.ASCII), re.compile(r"[\w-]*", re.ASCII)
_MARK = re.compile(
    r"(?P<close>\\*[\"'`])?(?:[ \t]*\])*"
    r"(?:,?[\s#/*+>-]{1,80}\\?[\"']?[vV]alue\\?[\"']?(?=[ ]{0,8}[:=]))?"
    r"(?P<space>[ \t]*(?(close)(?:\n[ \t#/*+>-]*(?=:))?|))"
    r"(?P<type>:[ \t]*(?:\"[^\"\n]{0,60}\"|'[^'\n]{0,60}'"
    r"|[A-Za-z_][\w.]{0,40}(?:\[[\w.\[\], |]{0,60}\])?(?: \| ?[\w.]{1,40})*)"
    r"(?=[ \t]*=(?!=)))?"
    r"[ \t]*(?P<mark>:=|[=!]=|=>|=|:(?!=)|,|\()?[ \t]*"
)
"""Pattern of the text between a name and its value."""
_LITERAL = (
    r"(?P<kind>[rbfuRBFU]{0,2})(?:\"{3}(?P<a>.{0,4000}?)\"{3}|'{3}(?P<b>.{0,4000}?)'{3}"
    r"|\\+\"(?P<c>[^\"\\\n]*)\\+\"|\\+'(?P<d>[^'\\\n]*)\\+'"
    r"|\"(?P<e>(?:[^\"\\\n]|\\.)*)\"|'(?P<f>(?:[^'\\\n]|\\.)*)'|`(?P<g>[^`\n]*)`)"
)
_STEP = re.compile(
    rf"{_LITERAL}|(?P<open>[\[({{])|(?P<shut>[\])}}])|(?P<end>[,;\n])"
    r"|(?P<on>(?:\b(?:or|and|else|if)\b|[%+\\])[ \t]*\n?[ \t]*)|(?P<test>[=!]=[ \t]*)"
    rf"|(?P<word>\w+|{HIDDEN})|[^\w\"'`\[\](){{}},;\n=!%+\\<]+|.",
    re.DOTALL,
)
"""Pattern of the next piece of a statement: a literal, a bracket, a possible end, an operator, a word, a sign."""
_NEXT_LINE = re.compile(r"[ \t]*(?:\\|#[^\n]*)?\n[ \t#/*+>-]*(?=[rbfuRBFU]{0,2}[\"'])")
_ELEMENT = re.compile(r"[^<>\n]*>([^<>\s]{3,500})</")
_BARE = re.compile(r"[^\s\"'`,;&)\]}>(\[{<|\\]+")
_TAIL = re.compile(r"(?:[,;][^\s\"'`,;=&)\]}>(\[{<|\\]+)+(?=[,;]?(?:\s|\Z))")
_SAID = re.compile(
    r"(?:[ ](?:is|was|are|provided|given|used|for|not valid|invalid)\b)*[ ]?[:=]?[ \t]+[\"'`]?([\w.+/=~!@#$%^&*-]{6,})"
)
_SETTING = re.compile(r"(?:ENV|ARG|setx?|aws configure set)[ \t]+(?:/\w[ \t]+)?\Z")
_TEMPLATE = re.compile(r"[ ]?(?:%[sr]|\{[\w!:]{0,20}\})[^\"'\n]{0,80}[\"']\s{0,80}(?:,|%|\.format(?=\())\s{0,80}")
_LINE_START = re.compile(
    r"(?:^|[\n{(,;])[\s+\-#/*>\"'`\\]*(?:(?:export|set|let|const|var|env|arg)[ \t]+)?\Z", re.IGNORECASE
)
_KEY_END, _CALLED, _QUOTE = re.compile(r"\s*:"), re.compile(r"[\w\])]\Z"), re.compile("[\"'`]")
_UNPACKED = re.compile(r"[\w.]+[ \t]*,[ \t]*\Z")
_THROUGH = re.compile(
    r"(?:^|\W|_)(?:str|bytes|bytearray|\w*decode|fromhex|unhexlify|encode|format|join|[lr]?strip|quote|get"
    r"|getenv|pop|setdefault|getattr|Secret(?:Str|Bytes))\Z"
)
"""Pattern of functions that return an argument, such as a default value, in the same or another form."""


@dataclass(frozen=True)
class _Place:
    """Name of a secret and what separates it from its value.

    Args:
        start, end: span of the name.
        sure: whether any value of this name is a secret. If False, only a value that looks random is.
        mark: the separator; "" = only white space.
        closed: whether the name itself is in quotes.
        starts: whether the name is at the beginning of a line or an entry, so that it is a key, not a word of prose.
        at: position behind the separator.
    """

    text: str
    start: int
    end: int
    sure: bool
    mark: str
    closed: bool
    starts: bool
    at: int

    @property
    def name(self) -> str:
        return self.text[self.start : self.end]

    def fits(self, value: str) -> bool:
        """Return whether a value that is not assigned directly is the secret. Ordinary words never are."""
        value = re.sub(r"\{[^{}]*\}", "", value)
        return not is_open(value) and (is_mixed if self.sure else looks_random)(value)

    def is_secret(self, value: str) -> bool:
        """Return whether a literal that is assigned directly is the secret."""
        if not self.sure or (self.mark == ":" and not self.starts) or "{" in value:
            return self.fits(value)
        phrase = words_of(self.name)[-1] in ("passphrase", "mnemonic")
        words = len(value.split()) <= (MOST_PHRASE_WORDS if phrase else MOST_WORDS)
        return words and not is_open(value) and not is_path(self.name, value)


def is_path(name: str, value: str) -> bool:
    """Return whether a value of `pwd` is a folder and not a password."""
    return name.lower().endswith("pwd") and value[:1] in "/~." and not looks_random(value)


def assigned(text: str) -> Iterator[Span]:
    """Yield the span of every value that is a secret because of its name."""
    done = 0
    for word in _NAME_WORD.finditer(lowered(text)):
        if word.start() < done:
            continue
        left = _LEFT.search(text, max(0, word.start() - MOST_NAME_CHARS), word.start())
        right = _RIGHT.match(text, word.end(), word.end() + MOST_NAME_CHARS)
        start, done = left.start() if left else word.start(), right.end() if right else word.end()
        kind = kind_of_name(text[start:done])
        if kind != "none" or word[0] == "basic":
            yield from _values(text, start, done, kind == "sure")


def _values(text: str, start: int, end: int, sure: bool) -> Iterator[Span]:
    behind = _MARK.match(text, end)
    assert behind is not None
    said = _SAID.match(text, end + len(behind["close"] or ""))
    if said and not is_open(said[1]):
        set_here = sure and _SETTING.search(text, max(0, start - 40), start)
        if looks_random(said[1]) or has_random_part(said[1]) or (set_here and is_mixed(said[1])):
            yield said.span(1)
    quote = text[start - 1] if start and text[start - 1] in "\"'`" else ""
    closed = bool(behind["close"]) and behind["close"][-1] == quote
    starts = closed or bool(behind["type"] or _LINE_START.search(text, max(0, start - 60), start))
    place = _Place(text, start, end, sure, behind["mark"] or "", closed, starts, behind.end())
    element = _ELEMENT.match(text, end) if start and text[start - 1] == "<" else None
    if element and place.fits(element[1]):
        yield element.span(1)
    if element or (behind["close"] and not closed):
        return
    if place.mark == "(":
        login = words_of(place.name)[-1] in ("login", "auth", "password", "passwd")
        yield from _statement(replace(place, sure=login), place.at, depth=1)
    elif place.mark == "," and closed:
        yield from _neighbour(place)
    elif place.mark in ("=", ":", ":=", "==", "!=", "=>") or text[start] == "-":
        yield from _value(place)


def _value(place: _Place) -> Iterator[Span]:
    """Yield the value behind the separator, and the literals that the statement can put in its place."""
    text = place.text
    following = _NEXT_LINE.match(text, place.at)
    at = following.end() if following and (place.mark != ":" or place.closed) else place.at
    literal = _literal(text, at)
    unpacked = place.mark == "=" and _UNPACKED.search(text, max(0, place.start - 80), place.start) is not None
    before = text[place.start - 1 : place.start]
    if template := _TEMPLATE.match(text, place.at) if not place.closed else None:
        yield from _statement(place, template.end(), commas=True)
    elif literal and not place.closed and before and literal[0].startswith(before):
        return  # the quote that seems to open a literal closes the one that the name is in
    elif place.starts or text[at : at + 1] in tuple("[({"):
        if literal and not unpacked and place.is_secret(_content(literal)[1]):
            yield _content(literal)[0]
        yield from _statement(place, literal.end() if literal and not unpacked else at, commas=unpacked)
    elif literal and place.is_secret(_content(literal)[1]):
        yield _content(literal)[0]
    if not literal:
        yield from _bare(place, at)


def _literal(text: str, at: int) -> re.Match[str] | None:
    """Return the match of a string literal that begins here."""
    step = _STEP.match(text, at)
    return step if step and step["kind"] is not None else None


def _content(literal: re.Match[str]) -> tuple[Span, str]:
    group = next(name for name in "abcdefg" if literal[name] is not None)
    return literal.span(group), literal[group]


def _statement(place: _Place, at: int, *, depth: int = 0, commas: bool = False) -> Iterator[Span]:
    """Yield the secrets among the literals up to the end of a statement.

    Args:
        depth: number of brackets that are open here.
        commas: whether a comma outside of brackets does not end it.
    """
    text, sign, operand = place.text, "", False
    last = at + (MOST_LIST_CHARS if text[at : at + 1] in tuple("[({") else MOST_STATEMENT_CHARS)
    if _QUOTE.search(text, at, last) is None or text.startswith(HIDDEN, at):
        return
    # For the statement and each open bracket: whether literals in it can become the value.
    counts = [True] * (1 + depth)
    while at < last and (step := _STEP.match(text, at)):
        at = step.end()
        if step["kind"] is not None:
            span, value = _content(step)
            is_key = len(counts) > 1 and _KEY_END.match(text, at)
            chosen = sign in ("or", "else") and place.is_secret(value)
            if counts[-1] and sign not in ("==", "!=") and not is_key and (chosen or place.fits(value)):
                yield span
        elif step["open"]:
            before = text[max(0, step.start() - 40) : step.start()]
            passes = step[0] == "(" and _THROUGH.search(before) is not None
            counts.append(counts[-1] and (passes or not _CALLED.search(before)))
        elif step["shut"]:
            counts.pop()
        elif step["word"] and operand and len(counts) == 1:  # two words in sequence: prose, or another setting
            return
        ends = step["end"] is not None and len(counts) == 1 and not (commas and step[0] == ",")
        if ends or not counts or len(counts) > MOST_DEPTH:
            return
        sign = (step["on"] or step["test"] or "").strip()
        operand = bool(step["kind"] is not None or step["word"] or step["shut"] or (operand and step[0].isspace()))


def _neighbour(place: _Place) -> Iterator[Span]:
    """Yield the literal beside a name in quotes: `"API_KEY", "..."`. In lists of names, each name has its own line."""
    following = _NEXT_LINE.match(place.text, place.at)
    literal = _literal(place.text, following.end() if following else place.at)
    place = replace(place, sure=place.sure and not following)
    if literal and place.fits(_content(literal)[1]) and kind_of_name(_content(literal)[1]) == "none":
        yield _content(literal)[0]


def _bare(place: _Place, at: int) -> Iterator[Span]:
    """Yield the span of a word without quotes, as in environment files, shells, YAML, logs and addresses."""
    text, bare = place.text, _BARE.match(place.text, at)
    tight = place.mark == "=" and at == place.end + 1
    if bare is None or (place.mark == "" and place.text[place.start] != "-"):
        return
    value = bare[0]
    if place.sure and tight and (tail := _TAIL.match(text, bare.end())):
        value = text[bare.start() : tail.end()]
    value, following = value.rstrip(".:"), text[bare.end() : bare.end() + 1]
    before = text[place.start - 1 : place.start]
    if in_address := before in tuple("?&;#") and tight:
        value = value.partition("#")[0]
    start = value[:300]
    if following in tuple("[({<") or len(value) < 3 or value[0] in "$%{*@":  # an expression, or a variable
        return
    other_name = re.fullmatch(r"[\w.-]+", start) and kind_of_name(start) != "none" and not looks_random(start)
    if other_name or is_open(start) or is_path(place.name, value):
        return
    if in_address:
        fits = place.sure or is_mixed(start) or words_of(place.name)[-1] in _IN_ADDRESS
    elif re.fullmatch(r"[A-Za-z_][A-Za-z_.]*", value):  # an expression, except in `NAME=value` of a shell
        fits = place.sure and tight and place.name.isupper() and (before + following).strip(" \n\t'\";") == ""
    else:
        fits = (is_mixed if place.sure else looks_random)(start)
    if fits:
        yield bare.start(), bare.start() + len(value)
