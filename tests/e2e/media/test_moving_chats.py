"""Videos and recordings in chats: by LLM.chat and over HTTP, the tokens of LLM.generate with what was decoded."""

import base64
import io
from pathlib import Path
from typing import Any

import av
import openai
import pytest

from quintet import LLM, SamplingParams
from quintet.media.decoding.jobs import DecodeJob
from quintet.media.decoding.videos import decode_video
from quintet.media.items import VIDEO
from tests.helpers.media.wrappers import make, sound
from tests.helpers.media_files import data_url
from tests.helpers.servers.serving import Server
from tests.media.audio.test_decode import wav
from tests.media.decoding.files import video_file

pytest.importorskip("PIL")

TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}MARK{% endif %}"
    "{% endfor %}{% endfor %}"
)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "16M"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FILE = video_file(20)  # 2 s, 10 frames a second
TEXT = ("What is ", " this?")


def content(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": TEXT[0]}, part, {"type": "text", "text": TEXT[1]}]


def test_a_chats_video_has_the_times_of_its_file(tmp_path: Path) -> None:
    made = make("qwen3_vl", tmp_path)
    llm = LLM(str(made.folder), **SETTINGS, use_tqdm=False)
    frames, times = decode_video(av, io.BytesIO(FILE), DecodeJob(VIDEO, num_frames=4))  # type: ignore[arg-type]
    known = {"fps": times.rate, "total_num_frames": times.total, "frames_indices": list(times.frames)}
    prompt = {
        "prompt": f"{TEXT[0]}{made.token_of('video')}{TEXT[1]}",
        "multi_modal_data": {"video": (frames, known)},
    }
    [want] = llm.generate(prompt, GREEDY, use_tqdm=False)
    text = made.processor.tokenizer.decode(want.prompt_token_ids)
    assert "<0.3 seconds>" in text and "<1.5 seconds>" in text, "frames 0, 6, 12 and 19, in pairs, at 10 a second"
    seen = content({"type": "video_url", "video_url": {"url": data_url(FILE, "video/mp4")}})
    template = TEMPLATE.replace("MARK", made.token_of("video"))
    options: Any = {"chat_template": template, "media_io_kwargs": {"video": {"num_frames": 4}}}
    [found] = llm.chat([{"role": "user", "content": seen}], GREEDY, use_tqdm=False, **options)
    assert found.prompt_token_ids == want.prompt_token_ids
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    llm.close()


@pytest.mark.slow
def test_a_server_hears_what_the_engine_hears(tmp_path: Path) -> None:
    made = make("qwen2_audio", tmp_path / "model")
    llm, samples = LLM(str(made.folder), **SETTINGS, use_tqdm=False), sound(0.7, 1)
    prompt = {"prompt": f"{TEXT[0]}{made.token}{TEXT[1]}", "multi_modal_data": {"audio": samples}}
    [want] = llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.close()
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("MARK", made.token))
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--device", "cpu",
             "--chat-template", str(template), "--limit-mm-per-prompt", '{"audio": 1}')  # fmt: skip
    data = base64.b64encode(wav(samples, 16000)).decode()
    heard: Any = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    with Server(str(made.folder), *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        more = {"return_token_ids": True, "ignore_eos": True}

        def asked(part: Any) -> Any:
            messages: Any = [{"role": "user", "content": part}]
            return client.chat.completions.create(
                model=made.folder.name, messages=messages, temperature=0, max_tokens=6, extra_body=more
            )

        assert asked(content(heard)).choices[0].token_ids == list(want.outputs[0].token_ids)
        with pytest.raises(openai.BadRequestError, match="1 are the most"):
            asked(content(heard) * 2)
        seen = {"type": "video_url", "video_url": {"url": data_url(FILE, "video/mp4")}}
        with pytest.raises(openai.BadRequestError, match="of the kind video, .* this model takes text and audio"):
            asked(content(seen))
        response = client.responses.create(
            model=made.folder.name, temperature=0, max_output_tokens=6, extra_body={"ignore_eos": True},
            input=[{"role": "user", "content": [{"type": "input_text", "text": TEXT[0]}, heard]}],  # type: ignore[list-item]
        )  # fmt: skip
        assert response.status in ("completed", "incomplete") and response.usage is not None
        assert response.usage.input_tokens > 17, "the rows of the recording are counted"
