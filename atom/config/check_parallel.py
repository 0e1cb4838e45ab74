"""Check that ranks can divide the model, and have devices."""

from __future__ import annotations

from atom.config.draft_methods import METHODS
from atom.config.parallel import ENGINE_JOBS
from atom.config.schema import MAX_RANKS, AttentionConfig, Config, GatedDeltaConfig, Mamba2Config, ModelConfig
from atom.devices import count_devices
from atom.errors import ConfigError, UnsupportedError


def check_parallel(config: Config, model: ModelConfig, device: str) -> None:
    """Check that ranks can divide the model."""
    ranks, data, experts = config.parallel.tensor, config.parallel.data, config.parallel.experts
    check_devices(config, device)
    check_pipeline(config, model)
    check_files(config)
    for block in model.with_heads:
        if divides_heads(ranks, block):
            continue
        heads, _, described = heads_of(block)
        max_ranks = min(heads, MAX_RANKS)  # config.json may state any number of heads
        listed = ", ".join(str(each) for each in range(1, max_ranks + 1) if divides_heads(each, block))
        raise UnsupportedError(f"parallel.tensor={ranks} does not divide {described} (supported: {listed})")
    if ranks * data % experts:
        of = "parallel.tensor" if data == 1 else "parallel.tensor * parallel.data"
        there = ", ".join(str(each) for each in range(1, ranks * data + 1) if ranks * data % each == 0)
        raise ConfigError(
            f"parallel.experts={experts} must divide the {ranks * data} ranks of {of} (supported: {there})"
        )
    given = f"parallel.experts={experts} (serve.enable_expert_parallel=true)"
    fewest = min((mlp.experts or 0 for mlp in model.mlps if mlp.kind == "moe"), default=0)
    if data > 1 and not fewest:
        raise ConfigError(
            f"parallel.data={data}: the model has no experts that groups could share; set parallel.data=1"
        )
    if experts > 1 and not fewest:
        raise ConfigError(f"{given}: the model has no experts; leave it out")
    if experts > 1 and any(mlp.expert_norm for mlp in model.mlps) and (data > 1 or experts < ranks):
        whole = "experts whose results are normed are not divided by width, nor between groups"
        raise UnsupportedError(f"{given}: {whole}; set it to parallel.tensor with parallel.data=1, or leave it out")
    if config.parallel.dispatch == "dispatch" and (data == 1 or experts == 1):
        needs = "groups whose ranks have experts of their own; set parallel=dp2_ep, or leave it out"
        raise ConfigError(f"parallel.dispatch=dispatch is for {needs}")
    if experts > max(fewest, 1):
        raise ConfigError(f"{given}: a layer has {fewest} experts; set parallel.experts to as many at most")


def check_devices(config: Config, device: str) -> None:
    """Check that each rank has a GPU of its own, and what ranks meet by."""
    parallel, unfit = config.parallel, {"cpu": ("nccl", "peers"), "cuda": ("gloo",)}[device]
    if parallel.collectives in unfit:
        there = "auto, gloo" if device == "cpu" else "auto, peers, nccl"
        raise UnsupportedError(
            f"parallel.collectives={parallel.collectives} is not for device={device} (supported: {there})"
        )
    num_devices = parallel.num_ranks * parallel.replicas
    if num_devices == 1 or device == "cpu" or config.job.kind not in ENGINE_JOBS:
        return
    names = ("data", "tensor", "pipeline", "replicas")
    given = " ".join(f"parallel.{name}={size}" for name in names if (size := getattr(parallel, name)) > 1)
    if parallel.launcher == "local" and (num_gpus := count_devices()) < num_devices:
        there = f"needs {num_devices} GPUs, one a rank, and this machine has {num_gpus}"
        raise UnsupportedError(f"{given} {there}; set as many at most, or device=cpu")
    if config.tune and parallel.pipeline > 1:
        instead = "tune without stages once, if need be with few layers (model.layers, load_dummy=true)"
        raise UnsupportedError(
            f"tune=true with parallel.pipeline={parallel.pipeline}: stages have other matmuls each; {instead}: what "
            "is measured is kept by shape, and stages use it"
        )


def check_pipeline(config: Config, model: ModelConfig) -> None:
    """Check that layers can be divided into stages."""
    num_stages, method = config.parallel.pipeline, config.serve.draft_method
    given, job = f"parallel.pipeline={num_stages}", config.job
    if job.pipeline_rank >= num_stages:
        raise ConfigError(f"job.pipeline_rank={job.pipeline_rank}: {given} has no such stage; set less")
    if num_stages == 1:
        return
    num_layers = sum(map(model.keeps_state, range(model.layers)))  # the others go with the layer before
    if num_stages > num_layers:
        of = "layers" if num_layers == model.layers else "layers with attention or a state"
        raise ConfigError(f"{given}: the model has {num_layers} {of}; set parallel.pipeline to as many at most")
    if method is not None and method.reads_all_stages:
        others = [name for name, each in METHODS.items() if not each.reads_all_stages]
        *some, last = sorted(others, key=lambda name: not METHODS[name].has_programs)
        instead = f"set serve.method to {', '.join(some)} or {last}, or divide each layer with parallel.tensor"
        raise UnsupportedError(
            f"{given} with serve.method={config.serve.method}: it reads hidden states of several stages; {instead}"
        )


def check_files(config: Config) -> None:
    """Check that one rank has all KV of an engine if KV is kept in files."""
    parallel = config.parallel
    for name in ("tensor", "pipeline", "data"):
        if config.serve.kv_cache_dir is not None and (size := getattr(parallel, name)) > 1:
            instead = "serve.swap_space keeps it in the memory of each rank's host; parallel.replicas have files"
            raise UnsupportedError(f"parallel.{name}={size} with serve.kv_cache_dir: no rank has all KV; {instead}")


def check_replicas(config: Config) -> None:
    """Check that the job has several engines."""
    replicas, kind = config.parallel.replicas, config.job.kind
    given = f"parallel.replicas={replicas}"
    if replicas == 1:
        return
    if kind == "explain":
        raise ConfigError(f"{given}: each replica is the whole model; explain one, without parallel=dp{replicas}")
    if kind not in ("serve", "batch"):
        raise ConfigError(f"{given}: job={kind} opens one model; leave it out, or write job=serve")


def divides_heads(ranks: int, block: AttentionConfig | GatedDeltaConfig | Mamba2Config) -> bool:
    """Whether ranks have equal parts of the heads; what several heads share may be on several ranks."""
    heads, shared, _ = heads_of(block)
    return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)


def heads_of(block: AttentionConfig | GatedDeltaConfig | Mamba2Config) -> tuple[int, int, str]:
    """The heads that ranks divide, those of keys and values or the groups which they share, and both in words."""
    if isinstance(block, GatedDeltaConfig):
        return block.value_heads, block.key_heads, f"{block.value_heads} value heads with {block.key_heads} of keys"
    if isinstance(block, Mamba2Config):
        return block.heads, block.groups, f"{block.heads} heads in groups of {block.heads // block.groups}"
    if block.kind == "gqa" and block.kv_heads:
        return block.heads, block.kv_heads, f"{block.heads} heads with {block.kv_heads} of keys and values"
    return block.heads, block.heads, f"{block.heads} heads"
