"""The conformance kit, section by section."""

import pytest

from tests.helpers.platforms import tpu
from tests.helpers.platforms.kit import assert_conforms, sections

pytestmark = tpu.needs_jax


# Each takes up to a minute: a share of the sweep has some, and .ci/run all but those of every trial where the platform
# has changed.
@pytest.mark.parametrize(
    ("section", "every"),
    sections(
        [pytest.mark.sweep, pytest.mark.timeout(300)],
        {"ops": 4, "attention": 3, "models": 4, "numbers": 4},
        whole=[pytest.mark.sweep, pytest.mark.timeout(1200)],
    ),
)
def test_it_conforms(section: str, every: int) -> None:
    assert_conforms("tpu", section, every)
