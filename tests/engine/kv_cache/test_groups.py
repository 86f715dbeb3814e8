"""Tests of groups of layers: which layers share tensors, and what a request holds then."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.engine.kv_cache.groups import KVCacheGroup, group_layers
from quintet.interface.types import Layout
from quintet.layers.layer_state import LayerMixer

PAGE, WINDOW, STEP = 16, 512, 2048
GEMMA = [None if layer % 6 == 5 else WINDOW for layer in range(26)]  # Gemma 3 1B: 4 of its 26 layers see all


def layer(window: int | None = None, width: int = 256) -> LayerMixer:
    layouts = (Layout(torch.bfloat16, (PAGE, 2, width), window=window),)
    return LayerMixer(SimpleNamespace(layouts=layouts))  # type: ignore[arg-type]


def held(layers: list[LayerMixer], tokens: int) -> int:
    """Bytes of the pages of one request."""
    found = group_layers(layers)
    return found.max_pages(tokens, PAGE, STEP) * found.page_bytes


def places(layers: list[LayerMixer]) -> list[tuple[Any, ...]]:
    return [(each.group, *each.tensor_indices) for each in layers]


def test_layers_of_one_shape_share_the_tensors_of_equal_groups() -> None:
    layers = [layer(window) for window in GEMMA]
    found = group_layers(layers)
    assert (len(found.groups), len(found.layouts)) == (7, 4)
    assert len(set(places(layers))) == 26, "two layers have one place"


@pytest.mark.parametrize("window", [None, WINDOW, 64])
def test_a_layer_of_another_shape_adds_its_own_tensor_alone(window: int | None) -> None:
    """Whether its group is there or not; the others stay where they were."""
    layers, odd = [layer(each) for each in GEMMA], layer(window, width=128)
    group_layers(layers)
    before = places(layers)
    found = group_layers([*layers, odd])
    assert places(layers) == before
    assert list(odd.tensor_indices) == [4] and found.layouts[4] == odd.layouts[0]
    assert found.groups[odd.group or 0] == KVCacheGroup(window)
    assert len(found.groups) == (8 if window == 64 else 7)


def test_a_long_request_holds_little_more_for_one_odd_layer() -> None:
    plain = [layer(window) for window in GEMMA]
    odd = layer(None, width=128)
    for tokens in (2048, 8192, 32768):
        ratio = held([*plain, odd], tokens) / held(plain, tokens)
        assert ratio == pytest.approx(1 + 128 / (4 * 256))


def test_on_a_stage_only_its_own_layers_have_tensors() -> None:
    layers, odd = [layer(window) for window in GEMMA], layer(None, width=128)
    whole = group_layers([*layers, odd])
    first, second = group_layers([*layers, odd], layers[:13]), group_layers([*layers, odd], [*layers[13:], odd])
    assert first.groups == second.groups == whole.groups
    assert odd.layouts[0] in second.layouts and odd.layouts[0] not in first.layouts
    assert list(odd.tensor_indices) == [len(second.layouts) - 1]


def test_layers_that_see_all_and_have_another_shape_bound_the_groups_of_the_others() -> None:
    """As in Gemma 4, whose layers that see all have wider heads: each of their pages has the tensors of a group of
    windowed layers, too."""
    layers = [layer(window, width=256 if window else 512) for window in GEMMA]
    found = group_layers(layers)
    assert (len(found.groups), len(found.layouts)) == (7, 8)
    assert len(set(places(layers))) == 26
    alike = [layer(window) for window in GEMMA]
    assert held(layers, 32768) == pytest.approx(held(alike, 32768) * (4 * 256 + 4 * 512) / (4 * 256))
