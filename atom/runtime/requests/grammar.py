"""Constrain answers to a grammar, regular expression or JSON schema, through `llguidance`.

    compiler = GrammarCompiler(Vocabulary(49152, frozenset({2}), tokenizer))
    matcher = compiler.compile({"regex": "[0-9]{3}"})     # of one sequence
    matcher.allowed(49152)                                # bool[V]: the tokens that may come next, never none
    matcher.push(token)                                   # True once the answer is complete

A matcher knows the tokens pushed to it and nothing else, so that chunks, preemption and the other rows of a batch do
not matter to it. `compile` may be called from any thread, and takes milliseconds for what people write by hand.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from atom.checkpoint import Tokenizer
from atom.errors import AtomError, RequestError, UnsupportedError
from atom.runtime.requests.detokenizer import BROKEN
from atom.runtime.requests.schemas.faults import find_fault
from atom.runtime.requests.schemas.outline import is_outlined, write_outline
from atom.runtime.requests.schemas.rewrite import Rewritten, rewrite_schema
from atom.runtime.requests.vocabulary import Vocabulary

LOG = logging.getLogger("atom.engine")
MAX_SCHEMA = 1 << 20  # bytes of a JSON schema, a grammar, or all choices
MAX_SEARCHED = 1 << 17  # bytes of a grammar whose fault is searched for
MAX_REGEX = 1 << 16  # bytes
MAX_PROPERTIES = 3000  # of a JSON schema: the time to compile it grows with the square of them
MAX_LEXER_STATES = 50_000  # of one sequence; one takes 1 or 2 kB
STEP_FUEL = 100_000  # work on one mask: some 10 ms
COMPILE_SECONDS = 5.0
MAX_GBNF = 8 << 10  # bytes of a grammar in GBNF, which takes time by the square of its length to convert, 0.8 s at most
NUM_KEPT = 32  # compiled grammars
MAX_KEPT = 1 << 18  # characters of these; compiled, one takes up to 200 bytes
MAX_END = 32  # tokens of the end of reasoning
# between the parts of a JSON text: a model may indent it, and not go on with spaces for ever
SPACE = r"[ \t\n\r]{1,64}"


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, state: Any) -> None:
        self._state = state  # an LLMatcher

    def allowed(self, vocab: int) -> npt.NDArray[np.bool_]:
        """bool[vocab]: the tokens allowed next. RequestError if the grammar is too complex."""
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        self._check()
        found = np.unpackbits(bits, count=vocab, bitorder="little").view(np.bool_)
        if not found.any():
            raise RequestError("structured_outputs: no token of the model continues the answer; change the grammar")
        return found

    def push(self, token: int) -> bool:
        """Take the sampled token; whether the answer is complete. RequestError if the token is not allowed."""
        self._state.consume_token(token)
        self._check()
        return bool(self._state.is_stopped())

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._state.deep_copy())

    def _check(self) -> None:
        if self._state.is_error():
            raise RequestError(f"structured_outputs: {_summarize(self._state.get_error())}")


class ReasoningMatcher:
    """The state of a sequence whose answer keeps to a grammar after reasoning, which is free.

    The answer does not end within its reasoning. Reasoning is optional if no text is required between the two: then
    the answer begins with the first token of either.
    """

    def __init__(self, matcher: GrammarMatcher, vocabulary: Vocabulary, reasoning: Mapping[str, str]) -> None:
        """reasoning: begin, empty if the prompt has it already; end; and then, the text after the end"""
        tokenizer = vocabulary.tokenizer
        assert tokenizer is not None, "a grammar needs one"

        def encode(name: str) -> list[int]:
            return tokenizer.encode(reasoning.get(name, ""), add_special_tokens=False)

        self._matcher, self._decode, self._stop_ids = matcher, tokenizer.decode, sorted(vocabulary.stop_ids)
        self._end_text, self._end, self._then = reasoning["end"], encode("end"), encode("then")
        begin = encode("begin")
        is_optional = not self._then and (len(begin) == 1 or (begin and not tokenizer.decode(begin[:1])))
        self._opener = begin[0] if is_optional else None  # of reasoning: one token, or one that is special
        self._forced = begin if self._then else []
        self._is_free = bool(self._then) or not begin
        self._tail: list[int] = []  # the last tokens of the reasoning

    def copy(self) -> ReasoningMatcher:
        copied = copy.copy(self)  # its lists are replaced, and never changed
        copied._matcher = self._matcher.copy()
        return copied

    def allowed(self, vocab: int) -> npt.NDArray[np.bool_]:
        """bool[vocab]: the tokens allowed next. RequestError if the grammar is too complex."""
        if self._forced:
            found = np.zeros(vocab, np.bool_)
            found[self._forced[0]] = True
        elif self._is_free:
            found = np.ones(vocab, np.bool_)
            found[[id for id in self._stop_ids if id < vocab]] = False
        else:
            found = self._matcher.allowed(vocab)
            if self._opener is not None:
                found[self._opener] = True
        return found

    def push(self, token: int) -> bool:
        """Take the sampled token; whether the answer is complete. RequestError if the token is not allowed."""
        opener, self._opener = self._opener, None
        if self._forced:
            if token != self._forced[0]:
                raise RequestError("structured_outputs: the answer's header has another token")
            self._forced = self._forced[1:]
        elif self._is_free:
            self._tail = [*self._tail, token][-MAX_END:]
            if self._tail[-len(self._end) :] == self._end or self._is_spelled():
                self._is_free, self._forced = False, self._then
        elif opener is not None and token == opener:
            self._is_free = True
        else:
            return self._matcher.push(token)
        return False

    def _is_spelled(self) -> bool:
        """Whether the reasoning ends with the text of its end, in other tokens than that text has by itself."""
        return len(self._end) > 1 and self._end_text in self._decode(self._tail)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. UnsupportedError without llguidance, RequestError if it does not fit."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        text = None if tokenizer is None else tokenizer.to_json()
        if tokenizer is None or text is None:
            lack = "the checkpoint has none" if tokenizer is None else "this one is code of the checkpoint's own"
            raise RequestError(f"structured_outputs needs a tokenizer that can be read: {lack}")
        if not vocabulary.stop_ids:
            raise RequestError("structured_outputs needs a token that ends the answer, which the checkpoint has not")
        try:
            import llguidance
        except ImportError:
            raise UnsupportedError("structured_outputs needs llguidance: pip install 'atom-run[structured]'") from None
        size = max(vocabulary.size, tokenizer.vocab_size)
        try:
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=size, eos_token=sorted(vocabulary.stop_ids))
        except Exception as error:  # the Rust library raises ValueError, or what a panic of it becomes
            reason = _summarize(str(error))
            raise RequestError(
                f"structured_outputs cannot be used with the checkpoint's tokenizer ({reason})"
            ) from None
        if misread := find_misread(tokenizer, self._tokenizer):
            raise RequestError(f"structured_outputs cannot be used with the checkpoint's tokenizer ({misread})")
        self._library, self._vocabulary = llguidance, vocabulary
        self._limits = llguidance.LLParserLimits(
            step_lexer_fuel=STEP_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        self._known: OrderedDict[str, GrammarMatcher] = OrderedDict()
        self._noted: set[str] = set()  # of what schemas lose
        self._lock = threading.Lock()  # of these

    def compile(
        self, wanted: Mapping[str, Any], reasoning: Mapping[str, str] | None = None, tool_calls: str | None = None
    ) -> GrammarMatcher | ReasoningMatcher:
        """Compile a matcher for structured_outputs after reasoning. RequestError if these are wrong.

        tool_calls: a grammar whose @answer is what structured_outputs say; None: the answer is that and nothing else
        """
        schema = self._rewrite(wanted)
        grammar = self._write(wanted) if schema is None else _write_schema(schema)
        try:
            matcher = self._compile(grammar if tool_calls is None else _join(grammar, tool_calls))
        except RequestError as error:
            place = find_fault(schema, self._refuse) if schema and len(grammar) <= MAX_SEARCHED else None
            raise error if place is None else place.fault(str(error).removeprefix("structured_outputs: ")) from None
        return matcher if reasoning is None else ReasoningMatcher(matcher, self._vocabulary, reasoning)

    def _compile(self, grammar: str) -> GrammarMatcher:
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known.copy()
        matcher = self._build(grammar)
        with self._lock:
            self._known[grammar] = matcher
            while len(self._known) > NUM_KEPT or (len(self._known) > 1 and sum(map(len, self._known)) > MAX_KEPT):
                self._known.popitem(last=False)
            return matcher.copy()

    def _rewrite(self, wanted: Mapping[str, Any]) -> Rewritten | None:
        """The JSON schema that is wanted, for the library; None if it is no schema."""
        if not {"json", "json_object"} & wanted.keys():
            return None
        given = _read_schema(wanted["json"]) if "json" in wanted else {"type": "object"}
        try:
            rewritten = rewrite_schema(given)
        except RecursionError:
            raise RequestError("structured_outputs: the JSON schema is nested too deeply") from None
        rewritten.schema["x-guidance"] = given.get("x-guidance", {"whitespace_pattern": SPACE})
        _check_schema(rewritten.schema)
        for note in rewritten.notes:
            if note not in self._noted:
                self._noted.add(note)
                LOG.warning("structured outputs: %s", note)
        return rewritten

    def _refuse(self, schema: Mapping[str, Any]) -> str:
        """Why the library refuses a schema; "" if it takes it."""
        return str(self._library.LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]})))

    def _write(self, wanted: Mapping[str, Any]) -> str:
        """The grammar in the library's form."""
        ((kind, value),) = wanted.items()
        match kind:
            case "regex":
                _check_size("the regular expression", value, MAX_REGEX)
                return str(self._library.LLMatcher.grammar_from_regex(value))
            case "choice":
                choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
                _check_size("the choice", choices, MAX_SCHEMA)
                return _lark(f"start: CHOICE\nCHOICE: {choices}")
        _check_size("the grammar", value, MAX_SCHEMA)
        return _lark(_from_gbnf(value) if re.search(r"^\s*root\s*::=", value, re.MULTILINE) else value)

    def _build(self, grammar: str) -> GrammarMatcher:
        """Build a grammar's matcher. A first token is tried, since most grammars that are too complex fail there."""
        built: list[GrammarMatcher | RequestError] = []

        def build() -> None:
            try:
                matcher = GrammarMatcher(
                    self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
                )
                matcher._check()
                probe = matcher.copy()
                probe.push(int(probe.allowed(self._tokenizer.vocab_size).argmax()))
                built.append(matcher)
            except RequestError as error:
                built.append(error)

        thread = threading.Thread(target=build, name="grammar", daemon=True)
        thread.start()
        thread.join(COMPILE_SECONDS)
        if not built:
            raise RequestError(f"structured_outputs takes more than {COMPILE_SECONDS:g} s to compile; make it simpler")
        if isinstance(built[0], RequestError):
            raise built[0]
        return built[0]


class Grammars:
    """The grammar compiler of a vocabulary, which is made once.

    Making it takes a second or two with a large vocabulary, and for most of that time no other thread runs: llguidance
    holds the interpreter's lock. So a server makes it before it is ready.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def open(self) -> GrammarCompiler:
        """The compiler; a thread waits for another that makes it. Errors as GrammarCompiler has them."""
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._vocabulary)
            return self._compiler

    def open_early(self) -> None:
        """Have it made by another thread. What cannot be made is reported to the first request that needs it."""
        threading.Thread(target=self.try_open, name="grammar compiler", daemon=True).start()

    def try_open(self) -> None:
        with contextlib.suppress(AtomError):
            self.open()


def find_misread(tokenizer: Tokenizer, theirs: Any) -> str | None:
    """A token that llguidance reads as another text than the tokenizer, if more than one in a thousand is."""
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]  # since the first space of a text may be dropped
    start = len(tokenizer.decode(anchor))
    texts = [text[start:] for text in tokenizer.decode_many([[*anchor, id] for id in range(tokenizer.vocab_size)])]
    whole = [(id, text) for id, text in enumerate(texts) if text and BROKEN not in text]
    misread = [
        (text, read) for id, text in whole if (read := theirs.decode_bytes([id]).decode(errors="replace")) != text
    ]
    return f"{misread[0][0]!r} is read as {misread[0][1]!r}" if len(misread) * 1000 > len(whole) else None


def _read_schema(value: Any) -> Mapping[str, Any]:
    """A JSON schema that is an object, or the text of one."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise RequestError("structured_outputs: the JSON schema is not an object")
        _check_schema(schema)
    except RequestError:
        raise
    except (ValueError, TypeError) as error:
        raise RequestError(f"structured_outputs: the JSON schema is no JSON ({error})") from None
    except RecursionError:
        raise RequestError("structured_outputs: the JSON schema is nested too deeply") from None
    return schema


def _check_schema(schema: Mapping[str, Any]) -> None:
    _check_size("the JSON schema", json.dumps(schema, allow_nan=False), MAX_SCHEMA)
    if (count := _count_properties(schema)) > MAX_PROPERTIES:
        raise RequestError(f"structured_outputs: the JSON schema has {count} properties, more than {MAX_PROPERTIES}")


def _write_schema(rewritten: Rewritten) -> str:
    if is_outlined(rewritten.schema):
        return _lark(write_outline(rewritten.schema, rewritten.places))
    return json.dumps({"grammars": [{"json_schema": rewritten.schema}]})


def _join(grammar: str, tool_calls: str) -> str:
    """The grammar of calls, with another one as its @answer."""
    _check_size("the grammar of tool calls", tool_calls, MAX_SCHEMA)
    (answer,) = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": tool_calls}, answer | {"name": "answer"}]})


def _count_properties(schema: Any) -> int:
    if isinstance(schema, list):
        return sum(map(_count_properties, schema))
    if not isinstance(schema, Mapping):
        return 0
    own = schema.get("properties")
    return (len(own) if isinstance(own, Mapping) else 0) + sum(map(_count_properties, schema.values()))


def _check_size(name: str, text: str, limit: int) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise RequestError(f"structured_outputs: {name} has {size} bytes, more than {limit}")


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _from_gbnf(text: str) -> str:
    """Convert a grammar in llama.cpp's notation, as xgrammar has it too, to Lark's."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    _check_size("a grammar in GBNF", text, MAX_GBNF)
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise RequestError("structured_outputs: the grammar is nested too deeply") from None
    except Exception as error:  # the library raises this class itself
        raise RequestError(f"structured_outputs: {_summarize(str(error))}") from None


def _summarize(text: str) -> str:
    """The library's message: its first line, and the reason further down for a regular expression."""
    first, *others = (text.strip() or "the grammar is not valid").splitlines()
    if first == "NoExtensionBias":  # of a schema or rule that refers only to itself
        first = "the grammar allows no text"
    return " ".join([first, *(line.removeprefix("error: ") for line in others if line.startswith("error: "))])
