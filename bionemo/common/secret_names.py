# SPDX-License-Identifier: Apache-2.0
"""Classify names of settings, environment variables and URL parameters as secret or not."""

import re
from functools import lru_cache


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
# words that make a name secret at any position, unless the last word is one of _DESCRIBES
_ANYWHERE = _words(
    "password passwords passwd passphrase passphrases passcode pwd secret secrets credential credentials creds "
    "authorization cookie cookies bearer jwt dsn sas webhook"
)
_DESCRIBES = _words(
    "name names file files path paths dir directory length len count size type ttl expiry expires timeout manager "
    "policy required enabled rotation column field version method mode format algorithm jar"
)
# words that make a name secret in the last position
_LAST = _words("auth oauth pat pw sig signature signatures otp totp hmac")
# words that may follow the secret word: authToken, session_token_value
_BEFORE = _words("value string header data base id")
# `..._key` is secret after one of these words, and in upper case after any word except _PLAIN_KEYS
_KEYS_OF = _words(
    "api access secret private session ssh signing signature encryption decryption service account storage shared "
    "master deploy client consumer app application user admin license licence subscription auth authentication hmac "
    "aes rsa tls ssl pgp gpg host integration root wandb ngc nvidia nvapi hf huggingface hub openai anthropic gemini "
    "google gcp aws azure github gitlab comet neptune mlflow clearml kaggle cohere mistral replicate sentry stripe "
    "slack datadog twilio sendgrid redis minio db database mysql postgres ray munge vault"
)
_PLAIN_KEYS = _words("public primary foreign sort cache group partition index lookup query")
_PASSES_OF = _words(
    "db database user mysql postgres pg redis mongo smtp mail ftp ssh admin root http https proxy sudo login basic "
    "auth account ldap keystore wandb"
)
# `..._token` is not secret after one of these words
_PLAIN_TOKENS = _words(
    "mask masked pad padding bos eos unk cls sep sot eot start end begin stop special sentinel first last next "
    "previous per new num number max min total n count consumed input output prompt target source vocab word text "
    "image class decoder encoder added extra additional training seen generated ignored blank line delimiter control "
    "unknown separator each all byte char sub language prefix suffix placeholder segment residue"
)
# compound words at the end of a name
_TOGETHER = re.compile(
    r"(?:(?:api|access|secret|private|session|auth|ssh|signing|encryption|master|account|wandb|service)keys?"
    r"|(?:api|access|auth|refresh|bearer|secret|session|hf|github)tokens?"
    r"|passw(?:or)?ds?|passphrase|pwd|sshpass|secrets?|credentials?|connectionstring|accesskeyid)$"
)
_SWITCHES = frozenset(("", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"))
_NOT_SECRET = frozenset(("PWD", "OLDPWD"))  # directories set by the shell


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a name, or a part of a dotted key, names a secret: WANDB_API_KEY, wandbKey, not tokenizer."""
    return any(_is_secret_part(part) for part in name.split("."))


def is_harmless_value(name: str, value: object) -> bool:
    """Return whether a value under a secret name is not secret: a boolean, an empty value, or a number of `tokens`."""
    text = str(value)
    if value is None or text.lower() in _SWITCHES:
        return True
    return name.lower().endswith("tokens") and re.fullmatch(r"[\d,._]+[kKMB]?", text) is not None


def _is_secret_part(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or name in _NOT_SECRET or words[-1] in _DESCRIBES:
        return False
    if _ANYWHERE.intersection(words) or _TOGETHER.search("".join(words)):
        return True
    if words[-1] in _BEFORE and len(words) > 1:
        if words[-2] in ("token", "tokens", "key", "keys") and words[-1] == "id":
            return words[-2] == "key" and len(words) > 2 and words[-3] == "access"  # mask_token_id, AWS_ACCESS_KEY_ID
        words.pop()
    upper = re.fullmatch(r"[A-Z0-9]+(_[A-Z0-9]+)+", name) is not None
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("token", "tokens"):
        return before not in _PLAIN_TOKENS
    if last in ("key", "keys"):
        return before in _KEYS_OF or (upper and before not in _PLAIN_KEYS)
    if last == "pass":
        return not before or upper or before in _PASSES_OF
    return last in _LAST
