from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom.config.load import load
from atom.errors import ConfigError
from atom.serve.auth.tenants import LimitError, Limits, Tenant, digest, read_keys, read_public_keys, read_tenants

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICa0C4+T//PYlxEvfrxYKyMtvXJRfQgv6Dz7MN3OQ9G7"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(tenant: Tenant) -> tuple[str, int] | None:
    """The limit that the next request is beyond, and when to come back."""
    try:
        tenant.begin()
    except LimitError as error:
        return error.limit, error.retry_after
    tenant.accept()
    tenant.end()
    return None


def test_requests_a_second():
    clock = Clock()
    tenant = Tenant("a", Limits(requests_per_second=2), clock=clock)
    assert [refused(tenant) for _ in range(3)] == [None, None, ("requests_per_second", 1)]
    clock.now = 0.49
    assert refused(tenant)
    clock.now = 0.51
    assert refused(tenant) is None and refused(tenant)
    clock.now = 100.0
    assert [refused(tenant) for _ in range(3)] == [None, None, ("requests_per_second", 1)], "none is saved up"
    slow = Tenant("b", Limits(requests_per_second=0.1), clock=clock)
    assert [refused(slow), refused(slow)] == [None, ("requests_per_second", 10)]
    assert (slow.num_requests, slow.num_refused) == (1, {"requests_per_second": 1})


def test_tokens_a_second_are_paid_for_afterwards():
    clock = Clock()
    tenant = Tenant("a", Limits(tokens_per_second=100), clock=clock)
    assert refused(tenant) is None
    tenant.charge(num_prompt=300)
    tenant.charge(num_output=50)
    assert refused(tenant) == ("tokens_per_second", 3)  # 251 tokens are missing
    clock.now = 2.5
    assert refused(tenant) == ("tokens_per_second", 1)
    clock.now = 2.52
    assert refused(tenant) is None
    assert (tenant.num_prompt_tokens, tenant.num_output_tokens) == (300, 50)


def test_requests_at_a_time_and_a_refused_one_takes_no_turn():
    tenant = Tenant("a", Limits(max_concurrent=2, requests_per_second=3), clock=Clock())
    tenant.begin()
    tenant.begin()
    assert [refused(tenant)] * 3 == [("max_concurrent", 1)] * 3
    tenant.end()
    assert refused(tenant) is None and refused(tenant) == ("requests_per_second", 1)


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [(0, 0, 0), (0, -5, 0), (0, 5, 5), (10, 0, 10), (10, -5, 10), (10, 5, 15), (-3, 0, -3), (-3, -5, -3)],
)
def test_a_tenants_priority_is_the_best_that_it_can_have(own: int, asked: int, expected: int):
    assert Tenant("a", Limits(priority=own)).prioritize(asked) == expected


def test_without_keys_a_request_has_the_priority_that_it_sets():
    assert [Tenant().prioritize(asked) for asked in (-5, 0, 5)] == [-5, 0, 5]


def test_a_file_has_tenants_by_name(tmp_path: Path):
    entries = {
        "batch": {"key": "sk-1", "requests_per_second": 5, "tokens_per_second": 2000.5, "max_concurrent": 8},
        "app": {"key": ["old", "new"], "priority": -1, "weight": 0.5, "public_key": PUBLIC, "admin": True},
    }
    for name, text in (("k.yaml", "batch: {key: sk-1, requests_per_second: 5, tokens_per_second: 2000.5, max_concurrent: 8}\n"
                                  f"app:\n  key: [old, new]\n  priority: -1\n  weight: 0.5\n  public_key: {PUBLIC}\n  admin: true\n"),
                       ("k.json", json.dumps(entries))):  # fmt: skip
        (tmp_path / name).write_text(text)
        batch, app = read_keys(f"@{tmp_path / name}")
        assert (batch.name, batch.limits, batch.digests) == ("batch", Limits(5, 2000.5, 8), [digest(b"sk-1")])
        assert (app.name, app.limits) == ("app", Limits(priority=-1, weight=0.5))
        assert not batch.is_admin and app.is_admin
        assert app.digests == [digest(b"old"), digest(b"new")] and app.public_key is not None and not batch.public_key
    (tmp_path / "clients.pub").write_text(f"# ours\n{PUBLIC} alice\n\n{PUBLIC} bob of Sales\n")
    given = [f"serve.http.api_keys=@{tmp_path}/k.yaml", f"serve.http.public_keys=@{tmp_path}/clients.pub"]
    found = read_tenants(load(given).serve.http)
    assert [each.name for each in found] == ["batch", "app", "alice", "bob of Sales"]
    assert all(each.public_key is not None and not each.digests for each in found[2:])
    twice = load([given[0], f"serve.http.public_keys=@{tmp_path}/k.yaml"]).serve.http
    with pytest.raises(ConfigError, match="batch is there twice"):
        read_tenants(twice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("[a]", "holds no key"),
        ("a: sk-1", "a is not a mapping"),
        ("a: {}", "a has neither key nor public_key"),
        ("a: {weight: 2}", "a has neither key nor public_key"),
        ("a: {key: 5}", "a.key is neither a word nor a list of words"),
        ("a: {key: 'b c'}", "a.key is neither a word nor a list of words"),
        ("a: {key: b, wieght: 2}", r"there is no wieght \(did you mean weight"),
        ("a: {key: b, admin: maybe}", "a.admin=maybe is neither true nor false"),
        ("a: {key: b, admin: 1}", "a.admin=1 is neither true nor false"),
        ("a: {key: b, models: sql}", "a.models=sql is not a list of names"),
        ("a: {key: b, models: []}", "not a list of names; leave it out if all may be used"),
        ("a: {key: b, models: [1]}", "not a list of names"),
        ("a: {key: b, weight: 0}", "a.weight=0 is not a number above 0"),
        ("a: {key: b, max_concurrent: 1.5}", "a.max_concurrent=1.5 is not a whole number above 0"),
        ("a: {key: b, max_concurrent: 0}", "a.max_concurrent=0 is not a whole number above 0"),
        ("a: {key: b, priority: x}", "a.priority=x is not a whole number"),
        ("a: {key: b, tokens_per_second: .inf}", "tokens_per_second=inf is not a number"),
        ("a: {key: b, tokens_per_second: true}", "tokens_per_second=True is not a number"),
        ("a: {key: sesame}\nb: {key: [c, sesame], admin: true}", "a and b have the same key; give each its own"),
        ("a: {public_key: nope}", "a.public_key is not a public key of Ed25519"),
        ("a: {key: sesame, : [", r" is not valid YAML, or has a name twice \(line 1\)$"),
        ("a: {key: sesame}\nb: {key: c}\na: {key: d}", r"or has a name twice \(line 3\)$"),
        ("a: {key: sesame, key: c}", r"or has a name twice \(line 1\)$"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_its_keys(tmp_path: Path, text: str, message: str):
    file = tmp_path / "k.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys(f"@{file}")
    assert "sesame" not in str(error.value) and "sk-1" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PUBLIC, "line 1 is not a named Ed25519 key"),
        (f"{PUBLIC} a\nssh-rsa AAAA b", "line 2 is not a named Ed25519 key"),
        ("ssh-ed25519 AAAA a", "line 1 is not a public key of Ed25519"),
        ("# none\n", "holds no key"),
    ],
)
def test_what_is_wrong_with_a_file_of_public_keys(tmp_path: Path, text: str, message: str):
    file = tmp_path / "clients.pub"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_public_keys(f"@{file}")
    with pytest.raises(ConfigError, match="name a file"):
        read_public_keys(PUBLIC)
    assert read_public_keys(None) == []
