"""The conformance kit, section by section."""

import pytest

from quintet.conformance import kit
from tests.helpers import tpu
from tests.helpers.kit import assert_conforms

pytestmark = tpu.needs_jax


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", kit.section_names())
def test_it_conforms(section: str) -> None:
    assert_conforms("tpu", section)
