"""A server whose engine says prepared texts, by the tool results in the prompt.

    python scripts/clients/scripted_engine.py SCRIPT.json checkpoint=FOLDER serve.http.port=0

SCRIPT.json is {"turns": [TEXT, …], "aside": TEXT}: a request with tools gets turns[number of tool results] or the last,
one without, such as for a title, the aside. All around the engine is real: HTTP, template, parsers, processes; and so
is the grammar of a request, to which the text has to keep.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "serve")]

from stub_engine import Options, StubEngine  # noqa: E402

from atom.checkpoint import Tokenizer  # noqa: E402
from atom.checkpoint.tokenizer_files import load_tokenizer  # noqa: E402
from atom.runtime.requests.grammar import GrammarCompiler  # noqa: E402
from atom.runtime.requests.vocabulary import Vocabulary  # noqa: E402
from atom.runtime.types import RequestOptions, RequestOutput, Sequence  # noqa: E402
from atom.sampling_params import SamplingParams  # noqa: E402

TOOLS, RESULT = "<|tools|>", "<|tool_result|>"  # tokens of the template's own, which no client writes
STOP = "<|im_end|>"
PIECE = 7  # characters of a piece of a text: markers and JSON are cut anywhere


@dataclass
class ScriptedEngine(StubEngine):
    """Says a piece of the chosen text in each step."""

    tokenizer: Tokenizer = field(kw_only=True)
    script: dict[str, Any] = field(kw_only=True)

    @cached_property
    def compiler(self) -> GrammarCompiler:
        stop_ids = frozenset(self.tokenizer.encode(STOP, add_special_tokens=False))
        return GrammarCompiler(Vocabulary(self.tokenizer.vocab_size, stop_ids, self.tokenizer))

    def prepare(
        self, prompt: list[int], params: SamplingParams, options: RequestOptions, *, request_id: str
    ) -> list[Sequence]:
        if params.structured_outputs is not None:
            matcher = self.compiler.compile(params.structured_outputs, params.reasoning, params.tool_calls)
            for token in self.tokenizer.encode(self.choose(prompt), add_special_tokens=False):
                matcher.push(token)  # RequestError if the text breaks off from the grammar
        return [Sequence(f"{request_id}-0", prompt, params, request_id=request_id)]

    def _obey(self, token: int) -> None:
        """A prompt steers nothing but the text."""

    def _emit(self, sequence: Sequence, text: str) -> None:
        text = self.choose(sequence.prompt)
        start = len(self.tokenizer.decode(sequence.output))
        piece = text[start : start + PIECE]
        tokens = self.tokenizer.encode(piece, add_special_tokens=False)
        sequence.output += tokens
        is_last = start + PIECE >= len(text)
        if is_last:
            sequence.finish_reason = "eos"
            del self.running[sequence.id]
        reason = sequence.finish_reason
        output = RequestOutput(sequence.request_id, sequence.index, piece, tokens, reason, is_last, [], sequence)
        self.callbacks[sequence.request_id](output)

    def choose(self, prompt: list[int]) -> str:
        tools, result = (self.tokenizer.encode(token, add_special_tokens=False)[0] for token in (TOOLS, RESULT))
        if tools not in prompt:
            return str(self.script["aside"])
        turns = self.script["turns"]
        return str(turns[min(prompt.count(result), len(turns) - 1)])


def main() -> int:
    script, *rest = sys.argv[1:]
    if rest[0] == "--engine":
        from atom.serve.engine import worker

        return worker.main(
            lambda start, progress: ScriptedEngine(
                Options(step_seconds=0.0),
                tokenizer=load_tokenizer(Path(str(start.config.checkpoint))),
                script=json.loads(Path(script).read_text()),
            )
        )
    from atom.config.load import load  # which an engine's process does without
    from atom.jobs.report import report
    from atom.serve.server import Server, run_loop

    config = load(rest)
    command = (sys.executable, str(Path(__file__)), script, "--engine")
    return report(lambda: run_loop(Server(config, command).run, config.serve.http))


if __name__ == "__main__":
    sys.exit(main())
