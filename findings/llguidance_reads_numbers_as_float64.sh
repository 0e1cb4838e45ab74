#!/usr/bin/env bash
# llguidance 1.9.1 reads the numbers of a JSON schema as float64, so bounds and constants beyond 2^53 are another number.
# It reads keywords in order, and additionalProperties after allOf without the patternProperties before it.
# Seen: const 9007199254740993 admits 9007199254740992 only; {"ab": 1} is not admitted by patternProperties ^a, allOf,
# additionalProperties false.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'P'
import json

import llguidance


def admits(schema: dict, text: str) -> bool:
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


patterns = {"type": "object", "patternProperties": {"^a": {}}, "allOf": [{"minProperties": 1}]}
found = [
    admits({"const": 9007199254740993}, "9007199254740993"),
    admits({"const": 9007199254740993}, "9007199254740992"),
    admits(patterns, '{"ab":1}'),
    admits(patterns | {"additionalProperties": False}, '{"ab":1}'),
]
print(*found)
raise SystemExit(found != [False, True, True, False])
P
