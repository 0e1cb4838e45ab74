"""Write the semantic graph of a model, with the programs that draft tokens.

graph = build(config.model, dtype="bf16", cache_dtype="bf16")
print(show(graph))
graph = build(config.model, "bf16", "bf16", method="mtp")                   # with programs that draft tokens
graph = build(config.model, "bf16", "bf16", method="draft", draft=draft)    # of another model
"""

from __future__ import annotations

from collections.abc import Collection

from atom.checkpoint import DRAFT_PREFIX
from atom.config import ModelConfig, QuantConfig
from atom.config.draft_methods import METHODS
from atom.config.taps import NO_TAPS, LayerTaps
from atom.errors import ConfigError
from atom.frontend.decoder import write_body, write_head, write_pool
from atom.frontend.drafts import WRITERS, kept_states
from atom.frontend.vision import write_vision
from atom.frontend.writer import Writer
from atom.graph import BODY, DRAFT_IN, HEAD, POOL, VISION, Graph

AS_STORED = QuantConfig()


def build(
    model: ModelConfig,
    dtype: str,
    cache_dtype: str,
    quant: QuantConfig = AS_STORED,
    *,
    method: str | None = None,
    draft: ModelConfig | None = None,
    pools: bool = False,
    images: bool = False,
    taps: LayerTaps = NO_TAPS,
) -> Graph:
    """`body`: tokens and positions i64[T] to hidden states [T, H]; `head`: rows of them [R, H] to logits [R, V].

    method: of drafting tokens, as serve.method; drafts.py has the programs of those that the text has programs for.
    draft: the model of serve.draft_model.
    images: whether `vision` makes, of patches, the rows that some tokens of `body` take, see vision.py and placed.py.
    taps: the layers that `body` returns after the hidden states, and those that are steered.
    pools: whether `pool` makes, of rows of hidden states, the vectors [R, H] that embeddings are pooled of.

    ConfigError if the model has no layer that drafts.
    """
    graph = Graph()
    writers: list[Writer] = []

    def writer(program: str, of: ModelConfig = model) -> Writer:
        prefix = DRAFT_PREFIX if of is draft else ""
        writers.append(Writer(of, graph.program(program), dtype, cache_dtype, quant, prefix))
        return writers[-1]

    vision = model.vision if images else None
    kept = kept_states(method, model, draft)
    write_body(writer(BODY), kept=kept, vision=vision, taps=taps)
    write_head(writer(HEAD))
    if pools:
        write_pool(writer(POOL))
    if vision is not None:
        write_vision(graph.program(VISION), vision, dtype)
    if method in WRITERS and (draft is not None or not METHODS[method].model_file):
        WRITERS[method](writer, draft or model, graph.programs[BODY].results[1 + len(taps.layers) :])
    if taps.layers and DRAFT_IN in graph.programs and not kept:  # which takes the last results: the hidden states
        body = graph.programs[BODY]
        body.fx.output_node().args = ((*body.results, body.results[0]),)
    check_scales(model, {name for each in writers if each.model is model for name in each.scaled})
    nodes = (node for program in graph.programs.values() for node in program.nodes)
    if quant.requires_act and not any("act" in node.kwargs for node in nodes):
        raise ConfigError(f"quant.act={quant.act}: no linear's weights are packed; quant={quant.act} packs them")
    return graph


def check_scales(model: ModelConfig, read: Collection[str]) -> None:
    """Check that each name in model.scales, channel_scales and norm is of something that the model has.

    read: the names of those that were
    """
    for name, scale in model.scales.items():
        if scale != 1 and name not in read:
            raise ConfigError(f"model.scales.{name}={scale}: no linear of this model is scaled so; leave it out")
    for name in (*model.norm.unweighted, *model.norm.weighs_input):
        if name not in read:
            raise ConfigError(f"model.norm: no norm of this model has the role {name}; leave it out")
    for name in model.channel_scales:
        if f"{name}_channels" not in read:
            raise ConfigError(f"model.channel_scales.{name}: no linear of this model is scaled so; leave it out")
