"""Plan the calibration of weights that are packed while they load."""

from __future__ import annotations

from pathlib import Path

from atom.cache import Cache
from atom.checkpoint import Checkpoint, Tokenizer
from atom.compiler import semantic_graph
from atom.config import Config, QuantConfig
from atom.errors import ConfigError, RequestError
from atom.frontend import build
from atom.graph import HEAD, Graph, Quantize
from atom.graph.recipe_contents import packed_to
from atom.graph.recipes import leaves
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.lower_moe import lower_moe
from atom.process.messages import say
from atom.runtime.kv.scales import PROMPT
from atom.runtime.requests.vocabulary import Vocabulary
from atom.weights.calibration import MAX_TOKENS, Calibration, read_built_in_text
from atom.weights.quantize import is_calibrated


def plan_calibration(
    graph: Graph,
    checkpoint: Checkpoint,
    config: Config,
    cache: Cache,
    sources: str,
    tokenizer: Tokenizer | None = None,
) -> Calibration | None:
    """Plan the calibration of weights that are packed while they load; None if none of them is calibrated."""
    if not find_calibrated(graph, config):
        return None
    semantic = semantic_graph(config)  # of all pipeline stages, which calibrate once
    formats = find_calibrated(semantic, config)
    text, tokens = read_calibration_text(config), list[int]()
    try:
        tokenizer = tokenizer or checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
        why = "no tokenizer to calibrate with"
        if tokenizer is not None:
            tokens = Vocabulary(config.model.vocab, frozenset(), tokenizer).tokenize(text)[:MAX_TOKENS]
    except RequestError as error:
        why = f"a tokenizer that cannot be used: {error}"
    if not tokens:
        if config.quant.calibration != "auto":
            raise ConfigError(f"quant.calibration={config.quant.calibration}: the checkpoint has {why}; leave it out")
        say(f"{formats[0]}: the checkpoint has {why}; weights are rounded to the nearest")
        return None
    rounded = {
        leaf.name: recipe.fmt
        for recipe in semantic.recipes()
        if isinstance(recipe, Quantize) and recipe.fmt in formats
        for leaf in leaves(recipe.part)
    }
    calibration = Calibration(plain_graph(config), rounded, tokens, checkpoint, cache, sources)
    if config.quant.calibration == "auto" and (obstacle := calibration.find_obstacle()):
        say(f"{formats[0]}: calibrated weights cannot be kept: {obstacle}; weights are rounded to the nearest")
        return None
    return calibration


def find_calibrated(graph: Graph, config: Config) -> list[str]:
    """The formats that weights are packed to while they load, of those that are calibrated."""
    return [fmt for fmt in formats_made(graph) if is_calibrated(fmt, config.quant.calibration)]


def formats_made(graph: Graph) -> dict[str, None]:
    """The formats that weights are packed to while they load."""
    return dict.fromkeys(fmt for recipe in graph.recipes() for fmt in packed_to(recipe))


def plain_graph(config: Config) -> Graph:
    """The model with plain weights, as the reference bodies run it; the head is left out if it is not packed."""
    dtype = "fp32" if config.device == "cpu" else config.dtype  # which a CPU multiplies faster
    graph = build(config.model, dtype, dtype, QuantConfig(fmt="none"))
    if config.quant.head == "plain":
        del graph.programs[HEAD]
    return lower_moe(graph, PassContext.of(Target("cpu"), level=0))


def read_calibration_text(config: Config) -> str:
    """The text that quant.calibration names. ConfigError if it cannot be read."""
    path = config.quant.calibration
    if path in ("auto", "prompt"):
        return PROMPT + "\n" + read_built_in_text()
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"quant.calibration={path}: {error}; set it to a text file, auto, prompt or none") from None
    if not text.strip():
        raise ConfigError(f"quant.calibration={path}: the file is empty")
    return text
