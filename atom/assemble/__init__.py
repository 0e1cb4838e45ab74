"""Build an engine from a configuration: compile, load weights, plan memory, open the runner.

engine = open_engine(load(["checkpoint=/models/qwen3"]), SilentProgress())
"""

from atom.assemble.adapters import open_adapters
from atom.assemble.calibration import formats_made
from atom.assemble.checks import check_values, left_out, mtp_patterns
from atom.assemble.compiling import compile_with, digest_of, left_plain, refuse_act
from atom.assemble.engine import open_engine
from atom.assemble.format_budget import settle_formats
from atom.assemble.kv_blocks import fit_limits, kinds_of_all, plan_stages, state_kinds
from atom.assemble.kv_scales import gather_kv_scales, set_kv_scales
from atom.assemble.loading import load_weights, open_checked
from atom.assemble.ranks import RankOpening, compare_ranks, describe_rank
from atom.assemble.runner import open_runner
from atom.assemble.weight_updates import open_rank_weights

__all__ = [
    "RankOpening",
    "check_values",
    "compare_ranks",
    "compile_with",
    "describe_rank",
    "digest_of",
    "fit_limits",
    "formats_made",
    "gather_kv_scales",
    "kinds_of_all",
    "left_out",
    "left_plain",
    "load_weights",
    "mtp_patterns",
    "open_adapters",
    "open_checked",
    "open_engine",
    "open_rank_weights",
    "open_runner",
    "plan_stages",
    "refuse_act",
    "set_kv_scales",
    "settle_formats",
    "state_kinds",
]
