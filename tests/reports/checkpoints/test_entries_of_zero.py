"""Entries of a config.json whose normal value is 0 are taken (claim: DeBERTa's type_vocab_size)."""

import pytest

from quintet.hub.config_checks import check_entries


def test_a_model_without_segments_is_taken() -> None:
    check_entries({"model_type": "deberta-v2", "type_vocab_size": 0, "vocab_size": 128100}, "config.json")


@pytest.mark.parametrize("value", [-1, 2.5, "2"])
def test_no_number_of_segments_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="type_vocab_size"):
        check_entries({"type_vocab_size": value}, "config.json")
