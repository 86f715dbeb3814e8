"""Published language models in GGUF: tokens, chat templates and probabilities, against transformers and llama.cpp."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quintet import SamplingParams
from tests.real import published
from tests.real.published import GGUF_MODELS, TEXT, engine, llama_cpp_python, models_folder, perplexity

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(3600)]
TEXTS = [
    "What is the capital of France?",
    "3 + 40 = 43\nCount: 1, 2,  3!  1234567890",
    "na\u00efve caf\u00e9, \u4f60\u597d \U0001f600\n\n\tend  ",
    "def f(x):\n    return {'a': [x, 2.5e-3]}  # done\r\n",
    "  leading spaces, tabs\t\t and\u00a0no-break",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940 \u0420\u0443\u0441",
]
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is water wet?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And ice?"},
    ],
]


@pytest.fixture(scope="module", params=GGUF_MODELS)
def file(request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = models_folder()
    if folder is None or not (folder / request.param).is_file():
        pytest.skip(f"set REAL_MODELS to a folder that holds {request.param}")
    yield folder / request.param
    published.reference.cache_clear()


def test_texts_are_cut_as_by_transformers_and_llama_cpp(file: Path) -> None:
    """transformers makes its tokenizer of the file by rules of its own."""
    _, theirs = published.reference(file)
    params = SamplingParams(max_tokens=1)
    ours = [each.prompt_token_ids for each in engine(file).generate(TEXTS, params)]
    assert ours == [theirs(text)["input_ids"] for text in TEXTS]
    if (python := llama_cpp_python()) is not None:
        _, tokens = published.of_llama_cpp(python, file, [1, 2], TEXTS)
        assert tokens == ours


def test_chats_are_rendered_as_by_transformers(file: Path) -> None:
    _, theirs = published.reference(file)
    if theirs.chat_template is None:
        pytest.skip(f"{file.name} has no chat template")
    llm = engine(file)
    for chat in CHATS:
        wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        (output,) = llm.chat(chat, SamplingParams(max_tokens=1))
        assert output.prompt_token_ids == wanted


def test_probabilities_are_those_of_transformers_and_llama_cpp(file: Path) -> None:
    """With activations in 16 bits a product differs by rounding; in 8 bits, the default, as much as llama.cpp's do."""
    found = published.measured(file)
    assert found.tokens == 1200 and 1 < found.transformers_perplexity < 40
    assert found.perplexity == pytest.approx(found.transformers_perplexity, rel=2e-3)
    assert found.mean_difference < 5e-3 and found.same_greedy_tokens == published.NEW_TOKENS
    assert found.perplexity_8_bits == pytest.approx(found.transformers_perplexity, rel=3e-2)
    if found.llama_cpp_perplexity is not None:
        assert found.perplexity_8_bits == pytest.approx(found.llama_cpp_perplexity, rel=2e-2)


def test_perplexity_is_of_all_tokens() -> None:
    assert perplexity(np.log([0.5, 0.125])) == pytest.approx(4.0) and len(TEXT) == 6000
