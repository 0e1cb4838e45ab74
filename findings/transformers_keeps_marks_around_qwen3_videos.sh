#!/usr/bin/env bash
# Qwen3VLProcessor of transformers 5.24.0 replaces <|video_pad|> only, so the marks that chat templates write around it stay
# around the frames, each of which has marks of its own. transformers 4.57 and vLLM replace the token and both marks.
# Seen: SVE of a prompt becomes S<0.5 seconds>SVE<2.5 seconds>SVEE.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'P'
from types import SimpleNamespace

import numpy as np
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

own = SimpleNamespace(
    video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), image_token="I", video_token="V", audio_token=None,
    vision_start_token="S", vision_end_token="E", all_special_multimodal_tokens=["I", "V"],
    _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(None, *given),
)
read = {
    "video_grid_thw": np.array([[2, 2, 2]]),
    "video_metadata": [SimpleNamespace(fps=1.0, frames_indices=[0, 1, 2, 3])],
}
frames = Qwen3VLProcessor.replace_video_token(own, read, 0)
(seen, *_), _ = Qwen3VLProcessor.get_text_with_replacements(own, ["SVE"], videos_replacements=[frames])
print(seen)
raise SystemExit(seen != "S<0.5 seconds>SVE<2.5 seconds>SVEE")
P
