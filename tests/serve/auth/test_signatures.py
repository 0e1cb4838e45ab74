from __future__ import annotations

import base64
import contextlib
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_private_key
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atom.errors import ConfigError
from atom.serve.auth.signatures import (
    BodyDigest,
    Component,
    Fields,
    Signature,
    SignatureError,
    Verifier,
    as_jwk,
    check_covered,
    content_digest,
    find_signatures,
    load_public_key,
    load_signing_key,
    parse_components,
    parse_dictionary,
    request_components,
    sign,
    signature_base,
)

# RFC 9421, appendix B.1.4: test-key-ed25519
PRIVATE = "MC4CAQAwBQYDK2VwBCIEIJ+DYvh6SEqVTm50DFtMDoQikTmiCqirVv9mWG9qfSnF"
PUBLIC = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAJrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs=\n-----END PUBLIC KEY-----\n"
# appendix B.2: test-request
REQUEST = [
    (b"Host", b"example.com"),
    (b"Date", b"Tue, 20 Apr 2021 02:07:55 GMT"),
    (b"Content-Type", b"application/json"),
    (b"Content-Digest", b"sha-512=:WZDPaVn/7XgHaAy8pmojAkGWoRx2UFChF41A2svX+TaPm+AbwAgBWnrIiYllu7BNNyealdVLvRwEmTHWXvJwew==:"),
    (b"Content-Length", b"18"),
]  # fmt: skip
BODY = b'{"hello": "world"}'
# appendix B.2.6
INPUT = 'sig-b26=("date" "@method" "@path" "@authority" "content-type" "content-length");created=1618884473;keyid="test-key-ed25519"'
VALUE = "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="
BASE = """\
"date": Tue, 20 Apr 2021 02:07:55 GMT
"@method": POST
"@path": /foo
"@authority": example.com
"content-type": application/json
"content-length": 18
"@signature-params": ("date" "@method" "@path" "@authority" "content-type" "content-length");created=1618884473;keyid="test-key-ed25519\""""

NOW = 1_800_000_000.0
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
COVERED = ["@method", "@authority", "@path", "content-digest"]


def scope(
    path: bytes = b"/foo", query: bytes = b"param=Value&Pet=dog", method: str = "POST", scheme: str = "https"
) -> dict[str, Any]:
    return {"method": method, "scheme": scheme, "path": path.decode(), "raw_path": path, "query_string": query}


def rfc_key() -> Ed25519PrivateKey:
    key = load_der_private_key(base64.b64decode(PRIVATE), None)
    assert isinstance(key, Ed25519PrivateKey)
    return key


def test_the_example_of_the_rfc_is_verified_and_signed_to_the_same_bytes():
    fields = Fields([*REQUEST, (b"Signature-Input", INPUT.encode()), (b"Signature", f"sig-b26=:{VALUE}:".encode())])
    (found,) = find_signatures(fields)
    resolve = request_components(scope(), fields)
    base, parameters = signature_base(found.components, found.parameters, resolve)
    assert base.decode() == BASE and f"sig-b26={parameters}" == INPUT
    load_public_key("here", PUBLIC).verify(found.value, base)
    signed = sign(rfc_key(), "sig-b26", found.components, found.parameters, resolve)
    assert signed == (INPUT, f"sig-b26=:{VALUE}:")


def test_the_derived_components_of_the_rfc():
    resolve = request_components(scope(b"/path", b"param=value"), Fields([(b"host", b"WWW.example.com:443")]))
    expected = {  # sections 2.2.1 to 2.2.7
        "@method": "POST", "@target-uri": "https://www.example.com/path?param=value", "@authority": "www.example.com",
        "@scheme": "https", "@request-target": "/path?param=value", "@path": "/path", "@query": "?param=value",
    }  # fmt: skip
    assert {name: resolve(Component(name)) for name in expected} == expected
    bare = request_components(scope(b"/p", b"", scheme="http"), Fields([(b"host", b"a:8000")]))
    assert [bare(Component(name)) for name in ("@query", "@request-target", "@authority")] == ["?", "/p", "a:8000"]


def test_fields_as_the_rfc_combines_them():
    # section 2.1, and 2.1.2 for members of dictionaries
    fields = Fields(
        [(b"X-OWS-Header", b"  Leading and trailing whitespace.  "), (b"Cache-Control", b"max-age=60"),
         (b"Cache-Control", b"   must-revalidate"), (b"Example-Dict", b"  a=1,    b=2;x=1;y=2,   c=(a   b   c), d")]
    )  # fmt: skip
    assert fields.resolve(Component("x-ows-header")) == "Leading and trailing whitespace."
    assert fields.resolve(Component("cache-control")) == "max-age=60, must-revalidate"
    members = {key: fields.resolve(Component("example-dict", (("key", key),))) for key in "abcd"}
    assert members == {"a": "1", "b": "2;x=1;y=2", "c": "(a b c)", "d": "?1"}


def test_digests_of_the_rfcs():
    for value in (
        REQUEST[3][1].decode(),
        "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",  # RFC 9530, appendix B.1
        "unknown=:AAAA:, sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",
    ):
        digest = BodyDigest(value)
        digest.update(BODY[:5])
        digest.update(BODY[5:])
        digest.check()
    digest.update(b" ")
    with pytest.raises(SignatureError, match="not that of the body"):
        digest.check()
    both = BodyDigest("sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:, sha-512=:AAAA:")
    both.update(BODY)
    with pytest.raises(SignatureError):
        both.check()
    for wrong in ("", "md5=:AAAA:", "sha-256=abc", "sha-256", "sha-256=:AAAA:, sha-256=:AAAA:"):
        with pytest.raises(SignatureError):
            BodyDigest(wrong)


def test_the_thumbprint_of_rfc_8037():
    raw = base64.urlsafe_b64decode("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo=")
    jwk = as_jwk(Ed25519PublicKey.from_public_bytes(raw))
    assert jwk["kid"] == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
    assert (jwk["kty"], jwk["crv"], jwk["x"]) == ("OKP", "Ed25519", "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo")


def signed(
    parameters: dict[str, Any] | None = None, covered: list[str] = COVERED, key: Ed25519PrivateKey = KEY, **changed: Any
) -> tuple[list[Signature], Any]:
    """A signature of the request, and the components of what arrives, which may have been changed since."""
    values = {"created": int(NOW), "keyid": "alice", "nonce": "one"} | (parameters or {})
    given_scope = {"query": b""} | changed.pop("signed_scope", {})
    fields = Fields([(b"host", b"a.example"), (b"content-digest", content_digest(b"x" * 32).encode())])
    components = [Component(name) for name in covered]
    values = {name: value for name, value in values.items() if value is not None}
    head = sign(key, "sig", components, values, request_components(scope(**given_scope), fields))
    arrived = [
        (b"host", changed.pop("host", b"a.example")),
        (b"content-digest", content_digest(changed.pop("digest", b"x") * 32).encode()),
    ]
    arrived += [(b"signature-input", head[0].encode()), (b"signature", head[1].encode())]
    fields = Fields(arrived)
    return find_signatures(fields), request_components(scope(**(given_scope | changed)), fields)


def verifier(now: float = NOW, seconds: float = 300.0, began: float = NOW - 1000) -> Verifier:
    times = iter([began])
    return Verifier({"alice": KEY.public_key()}, seconds, lambda: next(times, now))


@pytest.mark.parametrize(
    "covered", [COVERED, [*COVERED, "@query"], ["@method", "@target-uri"], ["@request-target", "@authority", "@method"]]
)
def test_a_request_that_is_as_it_was_signed_counts(covered: list[str]):
    name, found = verifier().verify(*signed({"alg": "ed25519", "expires": int(NOW), "tag": "x"}, covered))
    assert (name, found.label) == ("alice", "sig")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "PUT"}, "does not match"),
        ({"path": b"/foo/"}, "does not match"),
        ({"path": b"/f%6Fo"}, "does not match"),
        ({"query": b"a=1"}, "does not cover @query"),
        ({"host": b"b.example"}, "does not match"),
        ({"digest": b"y"}, "does not match"),
        pytest.param({"key": Ed25519PrivateKey.generate()}, "of another key", id="another key"),
        ({"covered": ["@method", "@path"]}, "does not cover @authority$"),
        ({"covered": ["@authority"]}, "does not cover @method, @path$"),
        ({"covered": ["@method", "@request-target"]}, "does not cover @authority$"),
        ({"covered": []}, "does not cover @authority, @method, @path$"),
        ({"parameters": {"keyid": "bob"}}, "keyid is not known"),
        ({"parameters": {"alg": "rsa-v1_5-sha256"}}, "alg is not ed25519"),
        ({"parameters": {"nonce": None}}, "has no nonce"),
        ({"parameters": {"created": None}}, "has no created"),
        ({"parameters": {"keyid": None}}, "has no keyid"),
        ({"parameters": {"nonce": "x" * 257}}, "1 to 256"),
        ({"parameters": {"nonce": ""}}, "1 to 256"),
        ({"parameters": {"created": int(NOW) - 301}}, "expired"),
        ({"parameters": {"expires": int(NOW) - 1}}, "expired"),
        ({"parameters": {"created": int(NOW) + 31}}, "31 s from now"),
    ],
    ids=str,
)  # fmt: skip
def test_a_request_that_was_changed_or_is_signed_otherwise_does_not(changed: dict[str, Any], message: str):
    with pytest.raises(SignatureError, match=message):
        verifier().verify(*signed(**changed))


def test_what_was_signed_before_the_start_does_not_count():
    """Its nonce may have been used with the process before."""
    verifier(began=NOW - 1).verify(*signed())
    with pytest.raises(SignatureError, match="before the server started"):
        verifier(began=NOW + 0.5).verify(*signed())


def test_a_nonce_counts_once_as_long_as_its_signature_could():
    now = [NOW]
    tested = Verifier({"alice": KEY.public_key()}, 300.0, lambda: now[0])
    (first,), resolve = signed({"created": int(NOW) + 30})
    tested.verify([first], resolve)
    tested.note(first)
    (other,), _ = signed({"nonce": "two"})
    tested.note(other)
    for seconds in (0, 100, 329.9):
        now[0] = NOW + seconds
        tested.verify([first], resolve)
        with pytest.raises(SignatureError, match="nonce has been used"):
            tested.note(first)
    now[0] = NOW + 330.1
    with pytest.raises(SignatureError, match="expired"):
        tested.verify([first], resolve)
    tested.note(signed({"nonce": "three"})[0][0])
    assert len(tested._nonces) == 1, "nonces of expired signatures are forgotten"


def test_one_of_several_signatures_is_enough():
    mine, resolve = signed()
    other, _ = signed({"keyid": "bob"})
    assert verifier().verify([*other, *mine], resolve)[0] == "alice"
    with pytest.raises(SignatureError, match="no signature"):
        verifier().verify([], resolve)


HEADERS = st.one_of(
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=200),
    st.from_regex(r'sig[0-9]?=\(("[@a-z-]+"(;(req|tr|sf|bs|key="?x"?))? ?){0,40}\)(;(created|nonce|keyid|alg|tag|expires)(="?[a-z0-9_]*"?)?){0,6}', fullmatch=True),
    st.lists(st.sampled_from([INPUT, "sig=1", "sig", "a=()", "b=:AA==:", "sig-b26=:AA==:", ",", "=", ";", '"'])).map(",".join),
)  # fmt: skip


@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_malformed_heads_are_refused_and_no_more(examples: int):
    @settings(max_examples=examples)
    @given(HEADERS, HEADERS, HEADERS)
    @example(INPUT, "sig-b26=1", "")
    @example('sig=("@method" "@method");created=1;keyid="alice";nonce="x"', "sig=:AA==:", "")
    @example('sig=("a";key=:AA==:);created=1;keyid="alice";nonce="x"', "sig=:AA==:", "")
    @example("sig=(" + '"@method" ' * 40 + ")", "sig=:AA==:", "")
    @example('sig=("ü")', "sig=:AA==:", "")
    def check(header: str, value: str, digest: str) -> None:
        head = [(b"signature-input", header.encode("latin-1")), (b"signature", value.encode("latin-1"))]
        fields = Fields([(b"host", b"a"), (b"content-digest", digest.encode("latin-1")), *head])
        with pytest.raises(SignatureError):
            verifier().verify(find_signatures(fields), request_components(scope(), fields))
        with pytest.raises(SignatureError):
            body = BodyDigest(digest)
            body.update(b"x")
            body.check()
        for component in (Component("signature"), Component("content-digest", (("key", "sha-256"),))):
            with contextlib.suppress(SignatureError):
                assert isinstance(fields.resolve(component), str)

    check()


@settings(max_examples=50)
@given(st.integers(0, 63), st.integers(1, 255))
def test_no_bit_of_a_signature_may_change(at: int, bits: int):
    (found,), resolve = signed()
    value = bytearray(found.value)
    value[at] ^= bits
    with pytest.raises(SignatureError, match="does not match"):
        verifier().verify([found._replace(value=bytes(value))], resolve)


@pytest.mark.parametrize(
    ("header", "value", "message"),
    [
        ('a=("x" "x")', "a=:AA==:", "a component twice"),
        ('a=("x";req "x";req)', "a=:AA==:", "a component twice"),
        ("a=(x)", "a=:AA==:", "not a list of components"),
        ('a="x"', "a=:AA==:", "not a list of components"),
        ('a=("x"), a=("x")', "a=:AA==:", "has a twice"),
        ('a=("x")', "b=:AA==:", "no bytes for a"),
        ('a=("x")', 'a="AA"', "no bytes for a"),
        ('a=("x");created="1"', "a=:AA==:", "whole seconds"),
        ('a=("x");created=1.5', "a=:AA==:", "whole seconds"),
        ('a=("x");created', "a=:AA==:", "whole seconds"),
        ('a=("x");nonce=5', "a=:AA==:", "are strings"),
        ('a=("x");keyid=token', "a=:AA==:", "are strings"),
        ("a=(), b=(), c=(), d=(), e=()", "a=:AA==:", "more than 4 signatures"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_head_is_said(header: str, value: str, message: str):
    with pytest.raises(SignatureError, match=message):
        find_signatures(Fields([(b"signature-input", header.encode()), (b"signature", value.encode())]))


def test_a_list_of_components_has_an_end():
    header = " ".join(f'"x{number}"' for number in range(33))
    with pytest.raises(SignatureError, match="more than 32 components"):
        parse_components("sig", parse_dictionary("signature-input", f"sig=({header})")["sig"])


def test_a_component_that_is_not_there_is_named():
    resolve = request_components(scope(), Fields([(b"host", b"a")]))
    for component, message in (
        (Component("x-none"), "the message has no x-none"),
        (Component("@status"), "@status is not supported"),
        (Component("@query-param", (("name", "a"),)), "@query-param is not supported"),
        (Component("host", (("sf", True),)), "of parameters, a field may have key"),
    ):
        with pytest.raises(SignatureError, match=message):
            resolve(component)
    with pytest.raises(SignatureError, match="cannot be signed"):
        signature_base([Component("x")], {}, lambda _: "é")
    check_covered([Component("@method"), Component("@target-uri")], resolve)
    with pytest.raises(SignatureError, match="@method"):
        check_covered([Component("@method", (("req", True),)), Component("@target-uri")], resolve)


def test_keys_are_read_as_openssh_and_openssl_write_them(tmp_path: Path):
    ssh = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICa0C4+T//PYlxEvfrxYKyMtvXJRfQgv6Dz7MN3OQ9G7 alice"  # the RFC's key
    assert load_public_key("x", ssh).public_bytes_raw() == load_public_key("x", PUBLIC).public_bytes_raw()
    file = tmp_path / "server.key"
    file.write_text(f"-----BEGIN PRIVATE KEY-----\n{PRIVATE}\n-----END PRIVATE KEY-----\n")
    key = load_signing_key(f"@{file}")
    assert key is not None and key.private_bytes_raw() == rfc_key().private_bytes_raw()
    assert load_signing_key(None) is None
    for wrong in ("", "x", "ssh-ed25519 AAAA", PUBLIC.replace("MCow", "MCoz"), ssh.replace("ssh-ed25519", "ssh-rsa")):
        with pytest.raises(ConfigError, match=r"^at x is not a public key of Ed25519"):
            load_public_key("at x", wrong)
    file.write_text(PUBLIC)
    with pytest.raises(ConfigError, match="not a private key of Ed25519 that can be read"):
        load_signing_key(f"@{file}")
    with pytest.raises(ConfigError, match="name a file"):
        load_signing_key("secret")
    with pytest.raises(ConfigError, match="No such file"):
        load_signing_key(f"@{tmp_path}/none")
