"""The conformance kit, section by section."""

import pytest

from tests.helpers.platforms import tpu
from tests.helpers.platforms.kit import assert_conforms, sections

pytestmark = tpu.needs_jax


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("section", "every"), sections(pytest.mark.slow, {"ops": 4, "attention": 3, "models": 4, "numbers": 4})
)
def test_it_conforms(section: str, every: int) -> None:
    assert_conforms("tpu", section, every)
