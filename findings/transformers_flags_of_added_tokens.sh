#!/usr/bin/env bash
# transformers 5.24 means to add only those tokens of tokenizer_config.json's added_tokens_decoder that tokenizer.json
# lacks, but compares hashes of its ids with hashes of tokens, so each is added again, and its flags replace those of
# tokenizer.json; one that the config names (eos_token, ...) becomes special whatever both files say.
# Seen: a token that is special in tokenizer.json and plain in the config reads as plain (and decode still skips it:
# tokenizers_state_that_is_not_serialized.sh); one that is plain in both and is the eos_token reads as special.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
"$folder/venv/bin/python" - "$folder" <<'P'
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer

folder = Path(sys.argv[1])
backend = Tokenizer(WordLevel({"a": 0, "<x>": 1, "<end>": 2, "[UNK]": 3}, unk_token="[UNK]"))
backend.pre_tokenizer = WhitespaceSplit()
backend.add_special_tokens(["<x>"])
backend.add_tokens([AddedToken("<end>", special=False)])
backend.save(str(folder / "tokenizer.json"))
listed = {"1": {"content": "<x>", "special": False}, "2": {"content": "<end>", "special": False}}
config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "added_tokens_decoder": listed}
(folder / "tokenizer_config.json").write_text(json.dumps(config))

tokenizer = AutoTokenizer.from_pretrained(folder)
flags = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
text = tokenizer.decode([0, 1, 2, 0], skip_special_tokens=True)
print(flags, repr(text))
raise SystemExit((flags, text.split()) != ({"<x>": False, "<end>": True}, ["a", "a"]))
P
