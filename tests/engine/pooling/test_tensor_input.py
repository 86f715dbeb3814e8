"""Models of TerraTorch are refused with the reason, with weights beside them or not."""

import json
from pathlib import Path

import pytest

from quintet import LLM


@pytest.mark.parametrize("name", ["Terratorch", "PrithviGeoSpatialMAE"])
@pytest.mark.parametrize("weights", [True, False])
def test_raw_tensors_are_refused(tmp_path: Path, name: str, weights: bool) -> None:
    config = {"architectures": [name], "pretrained_cfg": {"task": "SemanticSegmentationTask"}, "num_classes": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"load_format": "dummy"} if weights else {}
    with pytest.raises((ValueError, OSError), match=f"{name} is a model of TerraTorch: its input is raw tensors"):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, **settings)
