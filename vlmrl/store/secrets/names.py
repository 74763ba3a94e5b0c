"""Names of secrets: an estimate whether `OPENAI_API_KEY`, `dbpass`, `x-api-key` or `monkey` is the name of a secret.

A name is split into words (`openaiApiKey` -> openai, api, key). If words are written together, the last one is split
off: `PGPASSWORD` -> pg, password; `authtoken` -> auth, token. The short endings key, pass and pwd are split off only
after words that often precede them in names of secrets (`dbpass`, `sshkey`), because `monkey`, `compass` and `hotkey`
have these endings, too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import Literal

Sure = Literal["sure", "maybe", "none"]
"""Probability that a name is that of a secret.

sure: any value is hidden. maybe: only a value that looks random is hidden. none: no value is hidden.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SURE_WORDS = _words(
    "password passwd passphrase passcode secret apikey secretkey privatekey accesskey credential credentials mnemonic"
)
SYSTEMS = _words(
    "db database user usr admin root smtp imap mail email ftp sftp ssh mysql sql pg pgsql postgres postgresql mariadb"
    " redis rabbit rabbitmq mq amqp mqtt kafka mongo mongodb oracle elastic es proxy ldap bind vpn wifi http https"
    " server remote login sudo svc service account acct client keystore truststore cert pfx ssl tls registry docker git"
    " github gitlab jenkins samba smb rpc api app web"
)
"""Words after which `pass`, `pwd` or `pw` means a password."""
SURE_PAIRS = frozenset((first, "key") for first in _words("api access private secret signing encryption master auth"))
SURE_PAIRS |= {(first, "token") for first in _words("auth access api bearer refresh")} | {("account", "key")}
SURE_PAIRS |= {(first, last) for first in SYSTEMS for last in ("pass", "pwd", "pw")}
MAYBE_WORDS = _words(
    "key token auth login bearer pass pw pwd pat jwt sig signature cookie session dsn webhook authorization cred creds"
    " sas"
)
"""Words in names of passwords, but also of other values (a folder, weights of parts).

A short value under such a name is hidden only if it is not a word.
"""
PHRASES = _words("passphrase mnemonic")
"""Names whose value is a sequence of words."""
KEY_OWNERS = SYSTEMS | _words(
    "access private secret signing encryption master auth license licence deploy storage session host bot judge wandb"
    " openai anthropic hf huggingface gemini google azure aws cohere mistral groq together stripe"
)
LONG_ENDINGS = ("password", "passphrase", "passcode", "passwd", "secret", "token", "apikey", "credential")
"""Endings that are split off after any word."""
SHORT_ENDINGS = {"key": KEY_OWNERS, "pass": SYSTEMS, "pwd": SYSTEMS, "pw": SYSTEMS}
"""Endings that are split off only after these words."""
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
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words_of(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case: `OPENAI_API_KEY`, `openaiApiKey`, `x-apikey2` contain api and key."""
    return tuple(part for word in _WORD.findall(name) for part in _parts(word.lower()))


def _parts(word: str) -> tuple[str, ...]:
    """Split a word into the words that are written together in it: at most two."""
    one = _singular(word)
    if one in SURE_WORDS or one in MAYBE_WORDS:
        return (word,)
    for ending in LONG_ENDINGS:
        if one.endswith(ending):
            return one[: -len(ending)], word[len(one) - len(ending) :]
    for ending, owners in SHORT_ENDINGS.items():
        if one.endswith(ending) and one[: -len(ending)] in owners:
            return one[: -len(ending)], word[len(one) - len(ending) :]
    return (word,)


def _bare(name: str) -> list[str]:
    """Return the words of a name without SUFFIXES, and with the last word in the singular."""
    words = list(words_of(name.rpartition(".")[2] or name))
    if words[-2:] == ["key", "data"]:  # `key-data` in Kubernetes configurations
        words.pop()
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in SUFFIXES):
        words.pop()
    return [*words[:-1], _singular(words[-1])] if words else []


@lru_cache(maxsize=4096)
def kind_of_name(name: str) -> Sure:
    """Return how likely it is that a value with this name is a secret."""
    words = _bare(name)
    if not words:
        return "none"
    last, before = words[-1], words[:-1]
    if last in SURE_WORDS or tuple(words[-2:]) in SURE_PAIRS:
        return "sure"
    if last in MAYBE_WORDS:
        return "none" if before and before[-1] in OTHER_KINDS.get(last, ()) else "maybe"
    if last in ABOUT_IT:
        return "none"
    pairs = pairwise(words)
    return "maybe" if SURE_WORDS.intersection(words) or SURE_PAIRS.intersection(pairs) else "none"


@lru_cache(maxsize=4096)
def is_short_password(name: str) -> bool:
    """Return whether a name is `pwd` or `pw`, which mostly names a password."""
    return _bare(name)[-1:] in (["pw"], ["pwd"])


@lru_cache(maxsize=4096)
def holds_words(name: str) -> bool:
    """Return whether the secret of this name is a sequence of words: a passphrase, a mnemonic."""
    return not PHRASES.isdisjoint(_bare(name)[-1:])


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and word[:-1] in SURE_WORDS | MAYBE_WORDS else word
