"""Names of secrets: an estimate whether `OPENAI_API_KEY`, `dbpass`, `x-api-key` or `monkey` is the name of a secret.

A name is split into words (`openaiApiKey` -> openai, api, key). If words are written together, the last one is split
off: `PGPASSWORD` -> pg, password. The short endings key, pass, pwd and pw are split off only after words that often
precede them in names of secrets (`dbpass`, `sshkey`), because `monkey`, `compass` and `hotkey` have these endings, too.
"""

from __future__ import annotations

import re
from functools import lru_cache
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
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words_of(name: str) -> list[str]:
    """Return the words of a name: singular, lower case, without SUFFIXES (`OPENAI_API_KEYS_2` -> openai, api, key)."""
    words: list[str] = []
    for word in map(str.lower, _WORD.findall(name.rpartition(".")[2] or name)):
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
