"""Tenants: the holders of API keys or signing keys, and their limits.

    tenants = read_tenants(config.serve.http)                # none: nobody needs a key
    tenants[0].begin()                                       # LimitError beyond its limits
    tenants[0].accept()
    tenants[0].charge(num_prompt=512)
    tenants[0].end()

`serve.http.api_keys` and `serve.http.public_keys` name files. A plain one has an API key, or an OpenSSH public key of
Ed25519, on each line. One that ends with .yaml, .yml or .json has tenants by name:

    nightly-batch:
      key: sk-0123                     # or a list of keys, or public_key: ssh-ed25519 AAAA…
      requests_per_second: 5
      tokens_per_second: 2000
      max_concurrent: 8
      priority: 10
      weight: 0.5
      models: [llama, sql]             # the names of models and adapters that it may use
    ops: {key: sk-4567, admin: true}   # may use administrative routes too
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from atom.config import HTTPConfig
from atom.config.bounded_yaml import parse_yaml
from atom.config.spelling import did_you_mean
from atom.errors import AtomError, ConfigError
from atom.serve.auth.signatures import load_public_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAPPINGS = (".yaml", ".yml", ".json")  # suffixes of files that have tenants by name
MAX_RETRY = 60  # seconds


class LimitError(AtomError):
    """A tenant is beyond one of its limits."""

    def __init__(self, limit: str, message: str, seconds: float) -> None:
        self.limit = limit
        self.retry_after = min(max(math.ceil(seconds), 1), MAX_RETRY)
        super().__init__(f"{message} ({limit}); try again in {self.retry_after} s")


@dataclass(frozen=True)
class Limits:
    requests_per_second: float | None = None
    tokens_per_second: float | None = None  # of prompts and answers, in the mean
    max_concurrent: int | None = None  # requests
    priority: int = 0  # of its requests; lower is served earlier
    weight: float = 1.0  # its share under overload, relative to the others'


class Bucket:
    """A token bucket of a second: what is taken comes back at `rate`; it may be overdrawn."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._capacity = max(rate, 1.0)
        self._level, self._at = self._capacity, clock()

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is available; 0 if it is now."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._rate, self._capacity)
        self._at = now
        return max((amount - self._level) / self._rate, 0.0)

    def take(self, amount: float) -> None:
        self._level -= amount


@dataclass(eq=False)
class Tenant:
    """Whose request it is; "" if nobody needs a key."""

    name: str = ""
    limits: Limits = Limits()
    is_admin: bool = False  # it may use administrative routes
    models: frozenset[str] | None = None  # the names of models and adapters that it may use; None: all
    digests: list[bytes] = field(default_factory=list)  # of its API keys
    public_key: Ed25519PublicKey | None = None
    clock: Callable[[], float] = time.monotonic
    num_open: int = 0  # requests
    num_requests: int = 0  # that an engine took
    num_refused: Counter[str] = field(default_factory=Counter)  # requests, by limit, or queue_full
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def __post_init__(self) -> None:
        self._fill_buckets()

    def become(self, other: Tenant) -> None:
        """Take another's keys and limits, as a file that was changed has them; counts and open requests stay."""
        has_new_limits = self.limits != other.limits
        self.limits, self.is_admin, self.models = other.limits, other.is_admin, other.models
        self.digests, self.public_key = other.digests, other.public_key
        if has_new_limits:
            self._fill_buckets()

    def _fill_buckets(self) -> None:
        requests, tokens = self.limits.requests_per_second, self.limits.tokens_per_second
        self._requests = None if requests is None else Bucket(requests, self.clock)
        self._tokens = None if tokens is None else Bucket(tokens, self.clock)

    def begin(self) -> None:
        """Open a request, which counts as open until `end`. LimitError beyond a limit."""
        try:
            self._check()
        except LimitError as error:
            self.refuse(error.limit)
            raise
        self.num_open += 1

    def accept(self) -> None:
        """Count an open request that an engine took; not in `begin`, since a counter may not go down again."""
        self.num_requests += 1

    def refuse(self, limit: str) -> None:
        """Count a request that is beyond a limit, or that found the queue full."""
        self.num_refused[limit] += 1

    def end(self) -> None:
        self.num_open -= 1

    def charge(self, num_prompt: int = 0, num_output: int = 0) -> None:
        """Count tokens of a prompt or an answer."""
        self.num_prompt_tokens += num_prompt
        self.num_output_tokens += num_output
        if self._tokens is not None:
            self._tokens.take(num_prompt + num_output)

    def prioritize(self, given: int) -> int:
        """Clamp a requested priority to the key's own; lower is better."""
        return self.limits.priority + max(given, 0) if self.name else given

    def _check(self) -> None:
        limits = self.limits
        if limits.max_concurrent is not None and self.num_open >= limits.max_concurrent:
            what = f"{self.name} may have no more than {limits.max_concurrent} at a time"
            raise LimitError("max_concurrent", what, 1.0)
        if self._tokens is not None and (seconds := self._tokens.wait(1.0)):
            what = f"{self.name} may use {limits.tokens_per_second:g} tokens a second"
            raise LimitError("tokens_per_second", what, seconds)
        if self._requests is not None:
            if seconds := self._requests.wait(1.0):
                what = f"{self.name} may send {limits.requests_per_second:g} requests a second"
                raise LimitError("requests_per_second", what, seconds)
            self._requests.take(1.0)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_tenants(http: HTTPConfig) -> list[Tenant]:
    """Read the keys. ConfigError for a file that has none: no request would need one."""
    found = [*read_keys(http.api_keys), *read_public_keys(http.public_keys)]
    names: set[str] = set()
    for each in found:
        if each.name in names:
            raise ConfigError(
                f"serve.http.api_keys, serve.http.public_keys: {each.name} is there twice; "
                "give its entry in one file both key and public_key"
            )
        names.add(each.name)
    return found


def read_keys(given: str | None) -> list[Tenant]:
    """The tenants of serve.http.api_keys; those of a list are called key1, key2, …"""
    at = "serve.http.api_keys"
    if given is None:
        return []
    if not given.startswith("@"):
        keys = [key for each in given.split(",") if (key := each.strip())]
    elif (path := path_of(given)).suffix in MAPPINGS:
        return read_mapping(f"{at}={given}", path)
    else:
        lines = read_lines(f"{at}={given}", path)
        if wrong := next((line for line, key in lines if len(key.split()) > 1), None):
            fix = "write one key a line, and comments on lines that begin with #"
            raise ConfigError(f"{at}={given}: line {wrong} has more than one word; {fix}")
        keys = [key for _, key in lines]
    if not keys:
        raise ConfigError(f"{at} holds no key; name one, or null for none")
    return [Tenant(f"key{number}", digests=[digest(key.encode())]) for number, key in enumerate(keys, 1)]


def read_public_keys(given: str | None) -> list[Tenant]:
    """The tenants of serve.http.public_keys; those of a plain file are called as the comments of their keys."""
    if given is None:
        return []
    at = f"serve.http.public_keys={given}"
    if not given.startswith("@"):
        raise ConfigError(f"{at}: name a file, as in @clients.pub")
    path = path_of(given)
    if path.suffix in MAPPINGS:
        return read_mapping(at, path)
    found = []
    for number, line in read_lines(at, path):
        kind, _, comment = line.partition(" ")
        name = comment.strip().partition(" ")[2].strip()
        if kind != "ssh-ed25519" or not name:
            fix = "write ssh-ed25519 KEY NAME, as ssh-keygen -t ed25519 -C NAME does"
            raise ConfigError(f"{at}: line {number} is not a named Ed25519 key; {fix}")
        found.append(Tenant(name, public_key=load_public_key(f"{at}: line {number}", line)))
    if not found:
        raise ConfigError(f"{at} holds no key; name one, or null for none")
    return found


def read_mapping(at: str, path: Path) -> list[Tenant]:
    """The tenants of a YAML or JSON file."""
    try:
        entries = parse_yaml(read_text(at, path))
    except yaml.YAMLError as error:
        number = getattr(error, "line", None)  # the text itself has keys
        line = f" (line {number})" if number else ""
        raise ConfigError(f"{at} is not valid YAML, or has a name twice{line}") from None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{at} holds no key; write NAME: {{key: KEY}}")
    found = [read_entry(f"{at}: {name}", str(name), entry) for name, entry in entries.items()]
    holders: dict[bytes, str] = {}
    for tenant in found:
        for each in tenant.digests:
            if (holder := holders.setdefault(each, tenant.name)) != tenant.name:
                raise ConfigError(f"{at}: {holder} and {tenant.name} have the same key; give each its own")
    return found


def read_entry(at: str, name: str, entry: Any) -> Tenant:
    names = [each.name for each in dataclasses.fields(Limits)]
    if not isinstance(entry, dict):
        raise ConfigError(f"{at} is not a mapping; write {{key: KEY}}")
    given = dict(entry)
    keys, public_key, is_admin = given.pop("key", None), given.pop("public_key", None), given.pop("admin", False)
    models = given.pop("models", None)
    if unknown := next((each for each in given if each not in names), None):
        known = ["key", "public_key", "admin", "models", *names]
        raise ConfigError(f"{at}: there is no {unknown}{did_you_mean(str(unknown), known)} (known: {', '.join(known)})")
    for limit, value in given.items():
        check_limit(f"{at}.{limit}", limit, value)
    if not isinstance(is_admin, bool):
        raise ConfigError(f"{at}.admin={is_admin} is neither true nor false")
    is_list = isinstance(models, list) and models and all(isinstance(each, str) for each in models)
    if models is not None and not is_list:
        raise ConfigError(f"{at}.models={models} is not a list of names; leave it out if all may be used")
    keys = [keys] if isinstance(keys, str) else [] if keys is None else keys
    if not isinstance(keys, list) or not all(isinstance(key, str) and len(key.split()) == 1 for key in keys):
        raise ConfigError(f"{at}.key is neither a word nor a list of words; quote it")
    if not keys and public_key is None:
        raise ConfigError(f"{at} has neither key nor public_key; give one")
    known_key = None if public_key is None else load_public_key(f"{at}.public_key", str(public_key))
    digests = [digest(key.encode()) for key in keys]
    return Tenant(name, Limits(**given), is_admin, None if models is None else frozenset(models), digests, known_key)


def check_limit(at: str, limit: str, value: Any) -> None:
    is_whole = limit in ("max_concurrent", "priority")
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (limit != "priority" and value <= 0) or abs(value) >= 1 << 30:
        kind = "a whole number" if limit == "priority" else "a whole number above 0" if is_whole else "a number above 0"
        raise ConfigError(f"{at}={value} is not {kind}")


def path_of(given: str) -> Path:
    return Path(given[1:]).expanduser()


def read_text(at: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{at}: {getattr(error, 'strerror', error)}") from None


def read_lines(at: str, path: Path) -> list[tuple[int, str]]:
    """The lines of a file with their numbers, without comments and empty ones."""
    lines = enumerate(read_text(at, path).splitlines(), 1)
    return [(number, text) for number, line in lines if (text := line.strip()) and text[0] != "#"]
