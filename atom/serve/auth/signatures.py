"""HTTP message signatures (RFC 9421) with Ed25519, and Content-Digest (RFC 9530).

    fields = Fields(scope["headers"])
    verifier = Verifier({"alice": public_key}, seconds=300)
    name, signature = verifier.verify(find_signatures(fields), request_components(scope, fields))
    verifier.note(signature)                         # once the body has the digest that was signed
    given, value = sign(private_key, "sig", components, parameters, resolve)

A signature covers components: fields of the head, and what is derived of the message (`@method`, `@path`, …). Their
values and the parameters (created, nonce, …) are the lines of the signature base, which is what is signed. A verifier
says what must be covered: the request's line, its host, and if it has a body its Content-Digest; it keeps nonces,
so that a request counts once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atom.errors import AtomError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from starlette.types import Scope

EXTRA = "signatures need two packages; pip install 'atom-run[signatures]'"
HASHES = {"sha-256": hashlib.sha256, "sha-512": hashlib.sha512}
SKEW_SECONDS = 30.0  # that a client's clock may be ahead of ours
MAX_SIGNATURES = 4  # of a message
MAX_COMPONENTS = 32  # of a signature
MAX_NONCE = 256  # characters
NUMBERED = ("created", "expires")
TEXTS = ("keyid", "alg", "nonce", "tag")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}

Parameters = dict[str, Any]  # of a signature or of a component, by name


class SignatureError(AtomError):
    """A signature that does not count, and why."""


class Component(NamedTuple):
    """A component that a signature covers: a name with parameters, as in `"content-digest";req`."""

    name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def spelled(self) -> str:
        from http_sf import ser

        return str(ser((self.name, dict(self.parameters))))


class Signature(NamedTuple):
    label: str
    components: list[Component]
    parameters: Parameters
    value: bytes


Resolve = Callable[[Component], str]  # the value of a component. SignatureError if there is none


class Fields:
    """The fields of a head, by name: those of one name are one, joined by commas."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in headers:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip(" \t"))

    def get(self, name: str) -> str | None:
        values = self._values.get(name)
        return None if values is None else ", ".join(values)

    def resolve(self, component: Component) -> str:
        """The value of a field; of `key`, a member of it that is a dictionary."""
        value = self.get(component.name)
        if value is None:
            raise SignatureError(f"the message has no {component.name}")
        parameters = dict(component.parameters)
        key = parameters.pop("key", None)
        if parameters:
            raise SignatureError(f"{component.spelled}: of parameters, a field may have key")
        if key is None:
            return value
        from http_sf import ser

        members = parse_dictionary(component.name, value)
        if key not in members:
            raise SignatureError(f"{component.name} has no {str(key)[:64]}")
        return str(ser([members[key]]))


def parse_dictionary(name: str, value: str) -> dict[str, Any]:
    """A dictionary of structured fields (RFC 9651): members with their parameters. SignatureError if malformed."""
    from http_sf import parse

    def refuse(key: str, context: str) -> None:
        if context == "dictionary":  # a verifier and a proxy could take another one of them
            raise SignatureError(f"{name} has {key[:64]} twice")

    try:
        parsed = parse(value.encode("ascii"), tltype="dictionary", on_duplicate_key=refuse)
    except ValueError:
        raise SignatureError(f"{name} is not a dictionary of structured fields") from None
    assert isinstance(parsed, dict)
    return dict(parsed)


def parse_components(label: str, member: Any) -> tuple[list[Component], Parameters]:
    """A list of components with the parameters of their signature."""
    items, parameters = member
    if not isinstance(items, list) or not all(isinstance(name, str) and type(name) is str for name, _ in items):
        raise SignatureError(f"{label} is not a list of components")
    if len(items) > MAX_COMPONENTS:
        raise SignatureError(f"{label} has more than {MAX_COMPONENTS} components")
    components = [Component(name, tuple(each.items())) for name, each in items]
    if len({(each.name, frozenset(each.parameters)) for each in components}) < len(components):
        raise SignatureError(f"{label} has a component twice")
    return components, dict(parameters)


def find_signatures(fields: Fields) -> list[Signature]:
    """The signatures of a message. SignatureError if they are malformed."""
    inputs = parse_dictionary("signature-input", fields.get("signature-input") or "")
    values = parse_dictionary("signature", fields.get("signature") or "")
    if len(inputs) > MAX_SIGNATURES:
        raise SignatureError(f"the message has more than {MAX_SIGNATURES} signatures")
    found = []
    for label, member in inputs.items():
        components, parameters = parse_components(label, member)
        value, _ = values.get(label, (None, {}))
        if not isinstance(value, bytes):
            raise SignatureError(f"signature has no bytes for {label[:64]}")
        if any(type(parameters[each]) is not int for each in NUMBERED if each in parameters):
            raise SignatureError("created and expires are whole seconds")
        if any(type(parameters[each]) is not str for each in TEXTS if each in parameters):
            raise SignatureError(f"{', '.join(TEXTS)} are strings")
        found.append(Signature(label, components, parameters, value))
    return found


def signature_base(components: list[Component], parameters: Parameters, resolve: Resolve) -> tuple[bytes, str]:
    """The text that is signed, and its last line's value, which is the member of Signature-Input too."""
    from http_sf import ser

    lines = []
    for each in components:
        value = resolve(each)
        if not value.isascii() or "\n" in value or "\r" in value:
            raise SignatureError(f"the value of {each.name} cannot be signed")
        lines.append(f"{each.spelled}: {value}")
    members: Any = [([(each.name, dict(each.parameters)) for each in components], parameters)]
    given = str(ser(members))
    return "\n".join([*lines, f'"@signature-params": {given}']).encode("ascii"), given


def request_components(scope: Scope, fields: Fields) -> Resolve:
    """The components of a request to this server."""
    path = scope.get("raw_path") or scope["path"].encode()
    target = path.decode("latin-1") + ("?" + query if (query := scope["query_string"].decode("latin-1")) else "")
    authority = (fields.get("host") or "").lower().removesuffix(DEFAULT_PORTS[scope["scheme"]])
    derived = {
        "@method": scope["method"],
        "@scheme": scope["scheme"],
        "@authority": authority,
        "@path": path.decode("latin-1"),
        "@query": f"?{query}",
        "@request-target": target,
        "@target-uri": f"{scope['scheme']}://{authority}{target}",
    }
    return resolver(derived, fields)


def resolver(derived: Mapping[str, str], fields: Fields) -> Resolve:
    def resolve(component: Component) -> str:
        if not component.name.startswith("@"):
            return fields.resolve(component)
        if component.parameters or component.name not in derived:
            raise SignatureError(f"{component.name[:64]} is not supported (supported: {', '.join(derived)})")
        return derived[component.name]

    return resolve


class Verifier:
    """Verifies requests. Its clock is that of the world, in seconds since 1970."""

    def __init__(
        self, keys: Mapping[str, Ed25519PublicKey], seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """
        keys: by keyid; the mapping may be replaced
        seconds: how long a signature is valid after `created`
        """
        self.keys, self._seconds, self._clock = keys, seconds, clock
        self._began = clock()  # what was signed before may have been seen by another process
        self._nonces: dict[tuple[str, str], float] = {}  # keyid and nonce, and until when it is kept; oldest first

    def verify(self, signatures: list[Signature], resolve: Resolve) -> tuple[str, Signature]:
        """The keyid of the first signature that counts, and this. SignatureError, with the reason, if there is none."""
        faults = []
        for each in signatures:
            try:
                return self._verify(each, resolve), each
            except SignatureError as error:
                faults.append(error)
        raise faults[0] if faults else SignatureError("the request has no signature")

    def note(self, signature: Signature) -> None:
        """Mark a signature as used. SignatureError if it was used before."""
        now, name = self._clock(), (signature.parameters["keyid"], signature.parameters["nonce"])
        while self._nonces and next(iter(self._nonces.values())) < now:
            del self._nonces[next(iter(self._nonces))]
        if name in self._nonces:
            raise SignatureError("its nonce has been used before; sign each request anew")
        self._nonces[name] = now + self._seconds + SKEW_SECONDS

    def _verify(self, signature: Signature, resolve: Resolve) -> str:
        from cryptography.exceptions import InvalidSignature

        parameters, now = signature.parameters, self._clock()
        if missing := [each for each in ("created", "keyid", "nonce") if each not in parameters]:
            raise SignatureError(f"it has no {', '.join(missing)}")
        if parameters.get("alg", "ed25519") != "ed25519":
            raise SignatureError("its alg is not ed25519")
        if not 0 < len(parameters["nonce"]) <= MAX_NONCE:
            raise SignatureError(f"its nonce has not 1 to {MAX_NONCE} characters")
        key = self.keys.get(parameters["keyid"])
        if key is None:
            raise SignatureError("its keyid is not known here")
        self._check_time(parameters, now)
        check_covered(signature.components, resolve)
        try:
            key.verify(signature.value, signature_base(signature.components, parameters, resolve)[0])
        except InvalidSignature:
            raise SignatureError("it does not match the request, or is of another key") from None
        return str(parameters["keyid"])

    def _check_time(self, parameters: Parameters, now: float) -> None:
        created, expires = parameters["created"], parameters.get("expires")
        if created > now + SKEW_SECONDS:
            raise SignatureError(f"it was created {created - now:.0f} s from now; set the client's clock")
        if created < now - self._seconds or (expires is not None and expires < now):
            raise SignatureError("it has expired; sign each request anew")
        if created < self._began:
            raise SignatureError("it was created before the server started; sign the request anew")


def check_covered(components: list[Component], resolve: Resolve) -> None:
    """SignatureError if a request could be changed, or sent elsewhere, without changing what is signed."""
    names = {each.name for each in components if not each.parameters}
    needed = {"@method", "@authority", "@path", "@query"}
    if "@target-uri" in names:
        needed = {"@method"}
    elif "@request-target" in names:
        needed = {"@method", "@authority"}
    elif resolve(Component("@query")) == "?":
        needed.remove("@query")
    if missing := sorted(needed - names):
        raise SignatureError(f"it does not cover {', '.join(missing)}")


def covers_digest(signature: Signature) -> bool:
    return Component("content-digest") in signature.components


class BodyDigest:
    """The digest of a body that comes in parts, held against Content-Digest."""

    def __init__(self, given: str) -> None:
        """SignatureError if the field has no digest of an accepted algorithm, or is malformed."""
        members = parse_dictionary("content-digest", given)
        self._expected = {kind: members[kind][0] for kind in HASHES if kind in members}
        if not self._expected or not all(isinstance(each, bytes) for each in self._expected.values()):
            raise SignatureError(f"content-digest has no {' or '.join(HASHES)}")
        self._hashes = {kind: HASHES[kind]() for kind in self._expected}

    def update(self, data: bytes) -> None:
        for each in self._hashes.values():
            each.update(data)

    def check(self) -> None:
        """SignatureError unless all digests are those of the body."""
        for kind, expected in self._expected.items():
            if not hmac.compare_digest(self._hashes[kind].digest(), expected):
                raise SignatureError("content-digest is not that of the body")


def content_digest(sha256: bytes) -> str:
    """The field Content-Digest of a body."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def sign(
    key: Ed25519PrivateKey, label: str, components: list[Component], parameters: Parameters, resolve: Resolve
) -> tuple[str, str]:
    """The fields Signature-Input and Signature."""
    base, given = signature_base(components, parameters, resolve)
    return f"{label}={given}", f"{label}=:{base64.b64encode(key.sign(base)).decode()}:"


def load_public_key(at: str, text: str) -> Ed25519PublicKey:
    """An Ed25519 key in OpenSSH or PEM form. at: its place, for the ConfigError if it is invalid."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key
    except ImportError:
        raise ConfigError(f"{at}: {EXTRA}") from None
    load = load_ssh_public_key if text.startswith("ssh-") else load_pem_public_key
    try:
        key = load(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{at} is not a public key of Ed25519, as ssh-keygen -t ed25519 or openssl write it")
    return key


def load_signing_key(given: str | None) -> Ed25519PrivateKey | None:
    """The key of serve.http.signing_key. ConfigError if it cannot be read."""
    if given is None:
        return None
    at = f"serve.http.signing_key={given}"
    if not given.startswith("@"):
        raise ConfigError("serve.http.signing_key: name a file, as in @server.key")
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
    except ImportError:
        raise ConfigError(f"{at}: {EXTRA}") from None
    try:
        text = Path(given[1:]).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{at}: {error.strerror}") from None
    load = load_ssh_private_key if b"OPENSSH PRIVATE KEY" in text else load_pem_private_key
    try:
        key = load(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it needs a passphrase
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        fix = "write one without a passphrase, as openssl genpkey -algorithm ed25519 does"
        raise ConfigError(f"{at} is not a private key of Ed25519 that can be read; {fix}")
    return key


def as_jwk(key: Ed25519PublicKey) -> dict[str, str]:
    """The key as JSON (RFC 8037), with its thumbprint (RFC 7638) as `kid`."""
    members = {"crv": "Ed25519", "kty": "OKP", "x": encode_url(key.public_bytes_raw())}
    text = json.dumps(members, separators=(",", ":"), sort_keys=True)
    return {"kid": encode_url(hashlib.sha256(text.encode()).digest()), "alg": "EdDSA", "use": "sig", **members}


def encode_url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
