"""Weights as each rank has them, saved and read back: the same answers, and no others are taken for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet import LLM
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.interface.types import RankInfo
from quintet.model_loader.loader import fingerprint, load
from quintet.model_loader.sharded_state import fill, save
from quintet.model_loader.weight_files import WeightFiles
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make, variant
from tests.helpers.platforms.engines import answers, engine
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.null_engine import folder
from tests.helpers.releases import need_model_type


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def test_what_was_saved_answers_as_before(settings: dict[str, Any], tmp_path: Path) -> None:
    made = variant("llama", "plain")
    first = engine(made, **settings)
    want = answers(first, 4)
    first.save_sharded_state(str(tmp_path / "saved"))
    first.close()
    assert [file.name for file in (tmp_path / "saved").glob("*.safetensors")] == ["model-rank-0-part-0.safetensors"]
    saved = Tiny(tmp_path / "saved", made.config, made.reference)
    again = engine(saved, load_format="sharded_state", **settings)
    assert answers(again, 4) == want
    with pytest.raises(ValueError, match="with load_format='sharded_state' weights are not reloaded"):
        again.reload_weights()


def test_runais_streamer_reads_it_too(tmp_path: Path) -> None:
    pytest.importorskip("runai_model_streamer")
    made = variant("llama", "plain")
    first = engine(made)
    want = answers(first, 4)
    first.save_sharded_state(str(tmp_path))
    again = engine(Tiny(tmp_path, made.config, made.reference), load_format="runai_streamer_sharded")
    assert answers(again, 4) == want
    with pytest.raises(ValueError, match="with load_format='runai_streamer_sharded' weights are not reloaded"):
        again.reload_weights()


def test_other_settings_and_damaged_files_are_refused(tmp_path: Path) -> None:
    made = variant("llama", "plain")
    llm = engine(made)
    llm.save_sharded_state(str(tmp_path))
    saved = Tiny(tmp_path, made.config, made.reference)
    for other in ({"dtype": "bfloat16"}, {"quantization": "fp8"}):
        with pytest.raises(ValueError, match="was saved by another version of quintet, or with other settings"):
            engine(saved, load_format="sharded_state", **other)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model-rank-0-part-0.safetensors cannot be read \("):
        engine(saved, load_format="sharded_state")
    with pytest.raises(ValueError, match="the folder itself; give another folder"):
        llm.save_sharded_state(str(made.folder))


def test_a_platform_that_keeps_weights_elsewhere_says_so(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "null", "skip_tokenizer_init": True, "use_tqdm": False}
    with pytest.raises(ValueError, match="save_sharded_state: this device's weights do not lie in the host's memory"):
        LLM(str(folder()), load_format="dummy", **settings).save_sharded_state(str(tmp_path))


def test_every_rank_has_its_own(tmp_path: Path) -> None:
    """Of two ranks as threads: each finds its part, and neither takes the other's."""
    made, platform = variant("llama", "plain"), LoopbackPlatform()

    def work(rank: int, endpoint: str) -> list[dict[str, Any]]:
        place, sizes = RankInfo(rank, 2, endpoint), ModelSizes(torch.float32, page_size=16, max_model_len=64)
        first, second = (Worker(platform, made.config, sizes, place).model for _ in range(2))
        load(first, platform, made.folder, progress=False, rank=rank)
        save(first, tmp_path, rank, fingerprint(first, platform, "here"))
        weights = WeightFiles(tmp_path, "sharded_state", options={"placing": "here"})
        load(second, platform, weights, progress=False, rank=rank)
        with pytest.raises(ValueError, match="was saved by another version"):
            fill(second, tmp_path, rank, fingerprint(first, platform, "elsewhere"))
        return [dict(each.named_parameters(remove_duplicate=False)) for each in (first, second)]

    (first, again), (other, _) = each_rank(platform, 2, work)
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_buffers_of_the_transformers_backend_are_saved_too(tmp_path: Path) -> None:
    """Layers of Gemma 4 multiply by a number that is a buffer there."""
    need_model_type("gemma4_text")
    made = make("gemma4_text", {**PLAIN, "num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": 8})
    first = engine(made, model_impl="transformers")
    want = answers(first, 4)
    first.save_sharded_state(str(tmp_path))
    saved = Tiny(tmp_path, made.config, made.reference)
    again = engine(saved, load_format="sharded_state", model_impl="transformers")
    assert answers(again, 4) == want
    factors = ["beside.model.layers.0.layer_scalar", "beside.model.layers.1.layer_scalar"]
    (file,) = tmp_path.glob("*.safetensors")
    assert set(factors) <= load_file(file).keys()
