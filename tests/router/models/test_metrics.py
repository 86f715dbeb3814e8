"""Metrics of a server of several models, and those of its engines in one text."""

from quintet.router.metrics import RouterCounts
from quintet.router.models.metrics import ModelsSnapshot, scrape
from quintet.router.models.planner import MemoryLedger

ENGINE = (
    "# HELP quintet:api_calls Calls.\n# TYPE quintet:api_calls gauge\nquintet:api_calls 1.0\n"
    "# HELP quintet:http_requests_total Answers.\n# TYPE quintet:http_requests_total counter\n"
    'quintet:http_requests_total{status="200"} 3.0\n'
    "# HELP vllm:num_requests_running Requests.\n# TYPE vllm:num_requests_running gauge\n"
    'vllm:num_requests_running{model_name="%s"} 1.0\n'
)


def test_each_sample_of_an_engine_has_its_models_name() -> None:
    engines = {name: ENGINE % name for name in "ab"}
    text = scrape(ModelsSnapshot([], MemoryLedger(0, []), RouterCounts(), 0, engines)).decode()
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples)), "no series is there twice"
    for name in "ab":
        assert f'quintet:api_calls{{model_name="{name}"}}' in samples
        assert f'quintet:http_requests_total{{model_name="{name}",status="200"}}' in samples
        assert f'vllm:num_requests_running{{model_name="{name}"}}' in samples
    assert text.count("# TYPE quintet:api_calls") == 1
