#!/usr/bin/env bash
# llguidance 1.9.1 takes an added token whose text is in angle brackets for a special one, although tokenizer.json says
# "special": false. A grammar's literal "<tool_call>" then cannot be that token, only its spelled-out bytes; the token
# itself is written <[ID]> in Lark. Qwen's, GLM's and DeepSeek's markers are such tokens.
# Seen: "[TOOL]" (special: false) matches its literal as one token, "<tool_call>" (special: false) does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 tokenizers==0.22.1
"$folder/venv/bin/python" - <<'P'
import llguidance
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("[TOOL]", special=False)])
theirs = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=[tokenizer.token_to_id("<eos>")])


def takes(grammar: str, token: str) -> bool:
    matcher = llguidance.LLMatcher(theirs, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    return matcher.try_consume_tokens([tokenizer.token_to_id(token)]) == 1


angled = tokenizer.token_to_id("<tool_call>")
found = {
    'start: "[TOOL]"': takes('start: "[TOOL]"', "[TOOL]"),
    'start: "<tool_call>"': takes('start: "<tool_call>"', "<tool_call>"),
    f"start: <[{angled}]>": takes(f"start: <[{angled}]>", "<tool_call>"),
}
for grammar, is_taken in found.items():
    print(f"{grammar}: the token is {'taken' if is_taken else 'refused'}")
raise SystemExit(list(found.values()) != [True, False, True])
P
