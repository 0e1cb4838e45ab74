"""Read a Hugging Face folder: config.json, safetensors, tokenizer files.

    checkpoint = FolderCheckpoint(Path("/models/tiny"))
    checkpoint.read("model.norm.weight")     # a view of the mapped file: nothing is copied

Files are mapped and their headers checked when the folder is opened; bytes are read when they are touched.
Format: https://huggingface.co/docs/safetensors. Pickle files (.bin, .pt, .pth) are never opened.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from atom.checkpoint.base import Checkpoint, FileRange, StoredTensor, normalize_rope, read_json
from atom.checkpoint.cross_encoder import read_cross_encoder
from atom.checkpoint.files import MAX_DESCRIPTION, MAX_INDEX, map_file, read_file
from atom.checkpoint.modules import reads_more
from atom.checkpoint.tokenizer import Tokenizer
from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.dtypes import BY_SAFETENSORS, DTYPES
from atom.errors import CheckpointError, UnsupportedError

MAX_HEADER = 100 << 20  # bytes, as the safetensors library has it
MAX_DIMS = 16
INDEX = "model.safetensors.index.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"  # older than a video_processor in processor_config.json
OF_WHOLE = ("architectures", "tie_word_embeddings")  # of a config with one for its text; the head is outside that model
THINKER = "thinker_config"  # object in config.json with the fields of a whole model, of one that also speaks
TEXT_CONFIGS = ("text_config", "llm_config")  # objects in config.json with the fields of a whole model's text
CLASSIFIER = "ForSequenceClassification"  # ends the architectures of transformers that have a score of each label
NO_TEXT = re.compile(
    r"(model\.|thinker\.)?(visual|vision_tower|vision_model|vision_encoder|image_tower|video_tower|audio_tower|multi_modal_projector"
    r"|mm_projector|projector|vision_projector|vision_projection|audio_projector|mlp1|mlp_AR|aligner|merger|connector|resampler_model"
    r"|visual_embeddings_table|image_newline|embed_vision|vision_embedder|embed_audio|layerwise_projectors|spatial_projectors"
    r"|whisper_encoder|vq_adaptor|sound_encoder|sound_projection|vision_final_layernorm|vision_adapter|vision_backbone|qformer|query_tokens|language_projection"
    r"|vision_embed_tokens(?!\.wte)|high_res_vision_\w+|generation_(?:aligner|embeddings|head)|vqmodel|talker|token2wav|code2wav)(\.|$)"
)
TEXT = re.compile(r"^(?:thinker\.|language_model\.(?=lm_head|model\.|backbone\.)|(model\.)(?:language|text)_model\.)")
INNER = re.compile(r"(?<=^vision_tower\.)vision_model\.")  # a module within a tower, which newer files leave out
POOLING = {  # sentence-transformers' names
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_mean": "MEAN",
}
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")

# A tensor, its bytes in the mapped file, and the file and the byte that they start at.
Entry = tuple[StoredTensor, memoryview, Path, int]


class FolderCheckpoint(Checkpoint):
    def __init__(
        self,
        folder: Path,
        *,
        location: str | None = None,
        weights: bool = True,
        fetch_names: Callable[[], Collection[str]] = tuple,
        towers: Collection[str] = (),
    ) -> None:
        """fetch_names: asked for the names of tensors if the folder has neither weights nor an index
        towers: modules that read images, whose tensors are kept
        """
        self.location = location or str(folder)
        self._folder, self._fetch_names, self._towers = folder, fetch_names, towers
        self.config = with_modelopt(with_one_rope(with_inner_configs(read_config(folder))), folder)
        self.config |= read_pooling(folder)
        if pairs := read_cross_encoder(folder, read_modules(folder), self.config):
            self.config["cross_encoder"] = pairs
        self.config |= read_processors(folder)
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        stored = read_headers(folder) if weights else {}
        if reads_more(self.config):
            stored = {ours: entry for name, entry in stored.items() if (ours := self._name_of(name)) is not None}
        self._is_inner = self._has_no_head(stored)
        if self._is_inner:
            stored = {f"model.{name}": entry for name, entry in stored.items()}
        self.tensors = {name: entry[0] for name, entry in stored.items()}
        self._stored = stored
        if "sentence_transformers" in self.config or is_classifier(self.config):
            self.config = as_decoder(self.config, self._stored_names())

    def name_of(self, name: str) -> str | None:
        ours = self._name_of(name) if reads_more(self.config) else name
        return f"model.{ours}" if ours is not None and self._is_inner else ours

    def names(self) -> Collection[str]:
        names = self._stored_names()
        if self._has_no_head(names):
            return {f"model.{name}" for name in names}
        return {ours for name in names if (ours := self._name_of(name))} if reads_more(self.config) else names

    def _name_of(self, name: str) -> str | None:
        return tower_name(name, self._towers) or text_name(name)

    def _stored_names(self) -> Collection[str]:
        if self.tensors:
            return self.tensors.keys()
        if (self._folder / "model.safetensors").exists():
            return parse_header(self._folder / "model.safetensors")[0].keys()  # which is checked when it is opened
        return read_index(self._folder).keys() if (self._folder / INDEX).exists() else self._fetch_names()

    def read(self, name: str) -> memoryview:
        return self._find(name)[1]

    def locate(self, name: str) -> FileRange:
        _, data, path, start = self._find(name)
        return FileRange(path, start, len(data))

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return load_tokenizer(self._folder, trust_remote_code=trust_remote_code)

    def with_tensors(self) -> Checkpoint | None:
        if self.tensors:
            return self
        try:
            return FolderCheckpoint(self._folder, location=self.location, towers=self._towers)
        except CheckpointError:  # of a hub id, a part may be here; what is wrong with a folder is said when it is read
            return None

    def close(self) -> None:
        self._stored = {}  # a file stays mapped until its last view is gone

    def _has_no_head(self, names: Collection[str]) -> bool:
        """Whether these are the names of an embedding model saved without its head, inside which they begin."""
        return "sentence_transformers" in self.config and "embed_tokens.weight" in names

    def _find(self, name: str) -> Entry:
        if name not in self._stored:
            raise CheckpointError(f"{self.location} has no tensor {name}")
        return self._stored[name]


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json: {hint_of(folder)}")
    return read_json(path)


def read_processors(folder: Path) -> dict[str, Any]:
    """What a folder says of how images become patches, and what they have in a prompt, as entries for the config.

    {"image_processor": {"patch_size": 14, ...}, "processor": {"image_break_token": "[IMG_BREAK]", ...}}; {} if nothing.
    Of videos, it is a video_processor.
    """
    made: dict[str, Any] = {}
    if (folder / VIDEO_PROCESSOR).is_file():
        made["video_processor"] = read_json(folder / VIDEO_PROCESSOR)
    for name in ("processor_config.json", "preprocessor_config.json"):  # newer, older
        if (folder / name).is_file():
            found = read_json(folder / name)
            own = found.get("image_processor", {} if name.startswith("processor") else found)
            if name.startswith("processor"):
                made["processor"] = {key: each for key, each in found.items() if not isinstance(each, dict)}
                if isinstance(video := found.get("video_processor"), dict):
                    made["video_processor"] = video
            if isinstance(own, dict) and own:
                return made | {"image_processor": own}
    return made


def hint_of(folder: Path) -> str:
    """Suggest what to name in place of a folder that is no checkpoint."""
    if inside := next(iter(sorted(folder.glob("*.gguf"))), None):
        return f"name the file {inside} itself"
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return f"it is an adapter; checkpoint={base or '…'} serve.lora_modules={{NAME: {folder}}} serves it"
    if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
        return f"it is the hub's cache of checkpoint={folder.name.removeprefix('models--').replace('--', '/')}"
    if inner := sorted(path.parent for path in folder.glob("*/config.json")):
        return f"a checkpoint needs one, as {inner[0]} has"
    return "a checkpoint needs one"


def with_inner_configs(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the fields that stand in an object of their own: of a draft's layer, of a model that reads images.

    The first are speculators'; the second have the text's own values, but for those that only the whole has. Of a model
    that also speaks, the whole is what reads and writes.
    """
    if isinstance(thinker := config.get(THINKER), dict):
        own = {key: value for key, value in thinker.items() if value is not None and key != "architectures"}
        config = {key: value for key, value in config.items() if key != THINKER} | own
    inner = config.get("transformer_layer_config")
    at = next((key for key in TEXT_CONFIGS if isinstance(config.get(key), dict)), None)
    if at is not None:
        own = {
            key: value
            for key, value in config[at].items()
            if key not in config or (value is not None and key not in OF_WHOLE)
        }
        return {key: value for key, value in config.items() if key != at} | own
    return {**inner, **config} if isinstance(inner, dict) else config


def with_one_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A config with its rope in one form; unchanged if that fails, as an unknown architecture is the better refusal."""
    try:
        return normalize_rope(config)
    except UnsupportedError:
        return config


def tower_name(name: str, towers: Collection[str]) -> str | None:
    """The name of a tensor of one of these modules, which begins with the module; None for others."""
    found = NO_TEXT.match(name)
    if found is None or found[2] not in towers:
        return None
    return INNER.sub("", name[found.start(2) :])


def text_name(name: str) -> str | None:
    """The name that a tensor of a model that also reads images has in the text model; None for what reads images."""
    if NO_TEXT.match(name):
        return None
    return TEXT.sub(r"\1", name)


def read_pooling(folder: Path) -> dict[str, Any]:
    """How sentence-transformers makes embeddings, as an entry for the config; {} if its files do not say so.

    {"sentence_transformers": {"pooling": "LAST", "normalize": True}}; pooling is None if it is none of ours.
    """
    modules = read_modules(folder)
    if (at := pooling_file(modules)) is None or not (folder / at).is_file():
        return {}
    config = read_json(folder / at)
    modes = {mode for mode, is_on in config.items() if mode.startswith("pooling_mode_") and is_on is True}
    if isinstance(mode := config.get("pooling_mode"), str):  # as newer versions write it
        modes = {f"pooling_mode_{mode}"}
    pooling = POOLING.get(modes.pop()) if len(modes) == 1 else None
    normalize = any(str(each.get("type")).endswith(".Normalize") for each in modules)
    return {"sentence_transformers": {"pooling": pooling, "normalize": normalize}}


def as_decoder(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The config of an embedding model or classifier as that of a decoder.

    If no head is stored, the embedding serves as one. A classifier has sequence_classifier: true.
    """
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        config = {
            **config,
            "sequence_classifier": is_classifier(config),
            "architectures": [
                re.sub(rf"((Text)?Model|{CLASSIFIER})$", "ForCausalLM", str(name)) for name in architectures
            ],
        }
    has_head = not names or "lm_head.weight" in names
    return config if has_head else {**config, "tie_word_embeddings": True}


def is_classifier(config: dict[str, Any]) -> bool:
    """Whether this is the config of a decoder that classifies texts."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(str(name).endswith(CLASSIFIER) for name in architectures)


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """The steps that sentence-transformers makes an embedding with; [] for other checkpoints."""
    if not (folder / "modules.json").is_file():
        return []
    try:
        modules = json.loads(read_file(folder / "modules.json", MAX_DESCRIPTION))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'modules.json'} is not valid JSON ({error}); download it again") from None
    return [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []


def pooling_file(modules: list[dict[str, Any]]) -> str | None:
    """The path in the checkpoint of the file that says which tokens are pooled."""
    for each in modules:
        path = str(each.get("path"))
        if str(each.get("type")).endswith(".Pooling") and re.fullmatch(r"\w+", path):
            return f"{path}/config.json"
    return None


def with_modelopt(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config with the quantization_config that older versions of modelopt write into a file of its own."""
    path = folder / "hf_quant_config.json"
    if "quantization_config" in config or not path.exists():
        return config
    quantization = read_json(path).get("quantization")
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path} has no object quantization; download it again")
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def read_headers(folder: Path) -> dict[str, Entry]:
    """All tensors of a folder; {} if it has no weights."""
    if (folder / "model.safetensors").exists():
        return read_header(folder / "model.safetensors")
    if (folder / INDEX).exists():
        return read_shards(folder)
    stray = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if stray:
        raise CheckpointError(f"{folder} has {stray.name} but no {INDEX}: half a checkpoint; download it again")
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as pickle ({pickles[0]}), which can run code and is refused: "
            "if you trust it, convert it with from_pretrained and save_pretrained of transformers"
        )
    return {}


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    where = read_json(folder / INDEX, MAX_INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files; download it again")
    return where


def read_shards(folder: Path) -> dict[str, Entry]:
    where = read_index(folder)
    files = sorted(set(where.values()))
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{folder / INDEX} names {outside[0]!r}, which is not a file of this folder")
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        count = f"{len(missing)} of its {len(files)} weight files are"
        raise CheckpointError(
            f"{folder} is half a checkpoint: {count} not there, first {missing[0]}; download it again"
        )
    shards = {file: read_header(folder / file) for file in files}
    tensors: dict[str, Entry] = {}
    for file, shard in shards.items():
        for name in shard.keys() & tensors.keys():
            first = next(other for other in files if name in shards[other])
            raise CheckpointError(f"{folder} has the tensor {name} twice, in {first} and {file}")
        tensors |= shard
    for name, file in where.items():
        if name not in shards[file]:
            raise CheckpointError(f"{folder / file} lacks the tensor {name} that {INDEX} names; download it again")
    return tensors


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Its ranges must lie end to end and fill the file, as the format demands."""
    header, data, start = parse_header(path)
    try:
        entries = [
            (*entry["data_offsets"], name, str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
        ]
        numbers = [n for begin, end, _, _, shape in entries for n in (begin, end, len(shape), *shape[: MAX_DIMS + 1])]
    except (ValueError, KeyError, TypeError) as error:
        raise malformed(path, error) from None
    if not all(type(n) is int and n >= 0 for n in numbers) or any(len(entry[4]) > MAX_DIMS for entry in entries):
        raise CheckpointError(f"{path} has a malformed header: a shape or an offset is not a whole number")

    body = data[start:]
    tensors, position = {}, 0
    for begin, end, name, dtype, shape in sorted(entries):
        if dtype not in BY_SAFETENSORS:
            raise UnsupportedError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
        ours = BY_SAFETENSORS[dtype]
        if begin != position or (end - begin) * 8 != math.prod(shape) * DTYPES[ours].bits:
            what = f"tensor {name}, {dtype}{list(shape)},"
            raise CheckpointError(f"{path}: {what} does not fit its bytes {begin} to {end}; download it again")
        if end > len(body):
            raise CheckpointError(
                f"{path} is cut short: tensor {name} ends at byte {end} of {len(body)}; download it again"
            )
        tensors[name] = StoredTensor(ours, shape), body[begin:end], path, start + begin
        position = end
    if position != len(body):
        raise CheckpointError(f"{path} has {len(body) - position} bytes that no tensor names; download it again")
    return tensors


def parse_header(path: Path) -> tuple[dict[str, Any], memoryview, int]:
    """Parse a safetensors header: each tensor's entry, unchecked; the mapped file; the start of its data."""
    data = map_file(path)
    size = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if len(data) < 8 or size > len(data) - 8:
        raise CheckpointError(f"{path} is cut short in its header ({len(data)} bytes); download it again")
    if size > MAX_HEADER:
        raise CheckpointError(f"{path} is not a safetensors file: its header would have {size} bytes")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise malformed(path, error) from None
    return header, data, 8 + size


def malformed(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} has a malformed header ({type(error).__name__}: {error})")
