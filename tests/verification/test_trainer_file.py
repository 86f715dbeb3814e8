"""Files of a trainer's log-probabilities: what is read, and which line is wrong and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.verification.trainer_file import read_scores

GOOD: dict[str, Any] = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -1]}


def written(folder: Path, *lines: Any) -> str:
    file = folder / "scores.jsonl"
    file.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return str(file)


def test_an_output_and_a_text_without_a_prompt(tmp_path: Path) -> None:
    text = {"token_ids": [5, 6], "logprobs": [None, -2.0], "id": "a"}
    one, other = read_scores(written(tmp_path, GOOD, "", text), 10, 64)
    assert (one.ids, one.num_prompt, one.logprobs) == ([1, 2, 3, 4], 2, [None, None, -0.5, -1.0])
    assert (other.ids, other.num_prompt, other.logprobs) == ([5, 6], 0, [None, -2.0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ([1], "is list, not an object"),
        ({**GOOD, "logprob": [1]}, "did you mean 'logprobs'"),
        ({**GOOD, "token_ids": [3, 99]}, "token_ids has 99; token ids are 0 to 9"),
        ({**GOOD, "token_ids": [3, True]}, "token_ids has True"),
        ({**GOOD, "token_ids": []}, "token_ids is empty"),
        ({**GOOD, "logprobs": [-1]}, "2 token_ids and 1 logprobs"),
        ({**GOOD, "logprobs": [-1, None]}, "logprobs has None at 1"),
        ({**GOOD, "logprobs": [-1, 0.4]}, "is it a probability"),
        ('{"token_ids": [1, 2], "logprobs": [null, NaN]}', "logprobs has nan at 1"),
        ({"token_ids": [1] * 64, "logprobs": [-1] * 64}, r"has 64 tokens; fewer than max_model_len \(64\)"),
        ({"logprobs": []}, "token_ids is a list"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"line 2: .*{message}"):
        read_scores(written(tmp_path, GOOD, line), 10, 64)


def test_a_file_without_lines_and_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no line; write"):
        read_scores(written(tmp_path, ""), 10, 64)
    with pytest.raises(FileNotFoundError, match="is not there; give a file"):
        read_scores(str(tmp_path / "none"), 10, 64)
