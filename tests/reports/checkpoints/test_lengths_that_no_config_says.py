"""Models whose config.json does not say how long a text may be run with the entry that the error asks for."""

import json
from pathlib import Path

import pytest

from quintet.config import EngineConfig
from quintet.hub.max_model_len import model_length
from quintet.hub.model_impl import read_model

BLOOM = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}
XLSTM = {"model_type": "xlstm", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_heads": 4}


@pytest.mark.parametrize("entries", [BLOOM, XLSTM], ids=["bloom", "xlstm, by transformers' code"])
def test_the_entry_that_is_asked_for_is_taken(entries: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config, _ = read_model(EngineConfig(str(tmp_path)), tmp_path, {})
    with pytest.raises(ValueError, match="how long a text .* set hf_overrides={'max_position_embeddings': ...}"):
        model_length(config)
    given = EngineConfig(str(tmp_path), hf_overrides={"max_position_embeddings": 96})
    config, _ = read_model(given, tmp_path, {})
    assert model_length(config) == 96


def test_other_entries_stay_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BLOOM))
    with pytest.raises(ValueError, match="unknown entry of hf_overrides 'max_positions'"):
        read_model(EngineConfig(str(tmp_path), hf_overrides={"max_positions": 96}), tmp_path, {})
