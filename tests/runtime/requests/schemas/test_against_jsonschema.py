"""Grammars of random schemas admit what another implementation finds valid, of every value of a small world."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import combinations, permutations, product
from typing import Any

import pytest
from schema_grammars import admits, byte_compiler, compile_schema

from atom.errors import RequestError

pytest.importorskip("llguidance")
validators = pytest.importorskip("jsonschema_rs")

NAMES = ["a", "b", "ab", "c"]
LEAVES: list[Any] = [None, True, False, 0, 1, 2, -1, 1.5, 7, "", "a", "ab", "b", "x1"]
LISTS: list[Any] = [[], [1], [1, 1], ["a"], ["a", 1], [1, "a", None], [[]]]
SMALL: list[Any] = [True, False, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", None]}]
TYPES = ["object", "object", "object", "array", "string", "number", "integer", "boolean", ["string", "null"]]


def all_values() -> list[Any]:
    chance = random.Random(0)
    objects = [
        dict(zip(names, chance.choices([None, 1, 2, "a", 1.5, [1], {"a": 1}], k=size), strict=True))
        for size in range(4)
        for names in combinations(NAMES, size)
        for _ in range(5)
    ]
    return [*LEAVES, *LISTS, *objects]


def texts(value: Any) -> list[str]:
    """A value's texts: a grammar has the properties in one order."""
    if isinstance(value, dict):
        pairs = [[f"{json.dumps(name)}:{text}" for text in texts(each)] for name, each in value.items()]
        return [f"{{{','.join(chosen)}}}" for order in permutations(pairs) for chosen in product(*order)]
    if isinstance(value, list):
        return [f"[{','.join(chosen)}]" for chosen in product(*map(texts, value))]
    return [json.dumps(value)]


def random_schema(chance: random.Random, depth: int) -> Any:
    if depth < 0 or chance.random() < 0.08:
        return chance.choice(SMALL)

    def inner() -> Any:
        return random_schema(chance, depth - 1)

    def inners() -> list[Any]:
        return [inner() for _ in range(chance.choice([1, 2, 2]))]

    size = chance.choice([0, 1, 2])
    makers = {
        "enum": lambda: chance.sample([1, 2, "a", "ab", None, True, [1], {"a": 1}, 1.5], chance.choice([1, 2, 3])),
        "const": lambda: chance.choice([1, "a", None, [1], {"a": 1}, False]),
        "required": lambda: chance.sample(NAMES, chance.choice([1, 1, 2])),
        "propertyNames": lambda: chance.choice([{"enum": ["a", "b"]}, {"pattern": "^a"}, {"minLength": 2}, False]),
        "patternProperties": lambda: {"^a": inner()},
        "multipleOf": lambda: chance.choice([1, 2, 0.5]),
        "pattern": lambda: chance.choice(["^a", "b$", "^(?=a)[a-z]+$"]),
        "dependentRequired": lambda: {"a": ["b"]},
        "dependentSchemas": lambda: {"a": inner()},
        "unevaluatedProperties": lambda: False,
        "unevaluatedItems": lambda: False,
        "$ref": lambda: "#/$defs/x",
        **dict.fromkeys(("additionalProperties", "items", "not", "if", "then", "else"), inner),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), inners),
        **dict.fromkeys(("minimum", "exclusiveMinimum"), lambda: chance.choice([-1, 0, 1, 1.5])),
        **dict.fromkeys(("maximum", "exclusiveMaximum"), lambda: chance.choice([0, 1, 2, 1.5, 2**64 - 1])),
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), lambda: size
        ),
    }
    keys = chance.sample([*makers], chance.choice([0, 1, 1, 2, 2, 3, 4]))
    schema: dict[str, Any] = {"type": chance.choice(TYPES)} if chance.random() < 0.9 else {}
    if schema.get("type") == "object" or chance.random() < 0.3:
        schema["properties"] = {name: inner() for name in chance.sample(NAMES, chance.choice([1, 2, 2, 3]))}
    return schema | {key: makers[key]() for key in keys}


def compare(seeds: range) -> Counter[str]:
    """Compare both for random schemas. Returns how many are kept, refused, and have no valid value."""
    values = [(value, texts(value)) for value in all_values()]
    found: Counter[str] = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        schema = {"allOf": [random_schema(chance, 1 + seed % 2)], "$defs": {"x": random_schema(chance, 0)}}
        if isinstance(schema["allOf"][0], dict):
            schema |= schema.pop("allOf")[0]
        validator = validators.Draft202012Validator(schema)
        byte_compiler()._noted.clear()
        try:
            grammar = compile_schema(schema)
        except RequestError as error:
            is_empty = "nsatisfiable" in str(error) and "$defs" not in str(error)
            found["empty" if is_empty else "refused"] += 1
            assert not is_empty or not any(validator.is_valid(value) for value, _ in values), (seed, schema)
            continue
        found["kept"] += 1
        overlaps = any("oneOf" in note for note in byte_compiler()._noted)
        for value, forms in values:
            is_valid, is_admitted = validator.is_valid(value), any(admits(grammar, form) for form in forms)
            assert is_valid == is_admitted or (overlaps and is_admitted), (seed, schema, value)
    return found


def test_grammars_admit_what_is_valid():
    found = compare(range(25))
    assert found["kept"] > 10 and found["empty"] > 0, found


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 3000, 250))
def test_grammars_of_many_schemas_admit_what_is_valid(start: int):
    assert compare(range(start, start + 250))["kept"] > 80
