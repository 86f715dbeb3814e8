"""The JAX providers of sampling do what the specification does; the sampler reaches the device through them alone."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.sampling.logits_processors import RequestLogitsProcessor
from quintet.engine.sampling.sampler import Sampler, logprob_sizes
from quintet.ops import sampling
from quintet.ops.random import gumbel
from quintet.ops.registry import Op
from quintet.ops.sampling import NEVER, Draw
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.null_engine import drain
from tests.helpers.platforms.sampling import HOST, VOCAB, HostDevice, bound, logits_of, random_request
from tests.helpers.platforms.tpu import compilations, needs_jax, platform, programs

pytestmark = needs_jax

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
SIZES = logprob_sizes(VOCAB, -1)


@pytest.fixture(scope="module")
def device() -> Any:
    """JAX's device; opening it registers the providers."""
    return platform().open(0)


@pytest.fixture(scope="module")
def jax_ops(device: Any) -> Any:
    """Takes host tensors to the device, runs an op there, and brings what comes out back."""

    def upload(x: Any) -> Any:
        if isinstance(x, Draw):
            return Draw(*map(upload, x))
        return on_device(x) if isinstance(x, torch.Tensor) else x

    def on_device(x: torch.Tensor) -> torch.Tensor:
        from quintet.platforms.tpu.torchax_bridge import host_array

        return device.to_device([host_array(x)])[0]

    def run(op: Op, *args: Any) -> Any:
        found = op.providers["jax"](*map(upload, args))
        return tuple(device.to_host(x)() for x in found) if isinstance(found, tuple) else device.to_host(found)()

    return run


def rows_of_logits(rng: torch.Generator, vocab: int, rounded: bool = True, rows: int = 8) -> torch.Tensor:
    """Random rows; with ties if they are rounded; some have holes, one zeros of both signs."""
    logits = torch.randn(rows, vocab, generator=rng) * 4
    logits = logits.bfloat16().float() if rounded else logits
    logits[2, torch.rand(vocab, generator=rng) < 0.8] = NEVER
    logits[2, 0] = 1
    logits[3] = logits[3].sign() * 0.0
    return logits


def broken(logits: torch.Tensor) -> torch.Tensor:
    """Rows from which nothing can be drawn, for reasons of all kinds."""
    logits = logits.clone()
    logits[0, 3], logits[1, 4], logits[4], logits[5, 5:7] = float("nan"), float("inf"), NEVER, float("-nan")
    return logits


def random_draw(rng: torch.Generator, vocab: int, rows: int = 8) -> Draw:
    def maybe(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(rows, generator=rng) < 0.5, values, torch.tensor(off, dtype=values.dtype))

    uniform = torch.rand(4, rows, generator=rng)
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=rng).int()
    positions = torch.randint(0, 9999, (rows,), generator=rng).int()
    temperature = maybe(uniform[0] * 2 + 0.05, 0.0)
    top_k = maybe(torch.randint(1, 2 * vocab, (rows,), generator=rng).int(), 0)
    return Draw(temperature, top_k, maybe(uniform[1], 1.0), maybe(uniform[2] * 0.3, 0.0), keys, positions)


def test_noise_equals_the_specifications_to_a_rounding_of_each_logarithm(jax_ops: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    draw = random_draw(rng, 100)
    ids = torch.arange(20_001, dtype=torch.int32)[None]
    want, got = gumbel(draw.keys, draw.positions, ids), jax_ops(gumbel, draw.keys, draw.positions, ids)
    inner = torch.exp(-want)  # what the outer logarithm takes: its own rounding is relative
    limit = 2 * torch.finfo(torch.float32).eps * (1 + want.abs())
    assert bool(((got - want).abs() <= limit).all()) and float(inner.min()) > 0
    some = torch.tensor([[0, 1, 17, 20_000]] * 8, dtype=torch.int32)
    assert torch.equal(jax_ops(gumbel, draw.keys, draw.positions, some), got[:, some[0].long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 300, 9000])
def test_greedy_and_widen_equal_the_specification(jax_ops: Any, dtype: torch.dtype, vocab: int) -> None:
    logits = broken(rows_of_logits(torch.Generator().manual_seed(vocab), vocab)).to(dtype)
    assert torch.equal(jax_ops(sampling.greedy, logits), sampling.greedy(logits))
    for copy in (True, False):
        wide = jax_ops(sampling.widen, logits, 5, copy)
        assert torch.equal(wide.nan_to_num(), logits[:5].float().nan_to_num())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [7, 1000])
def test_cuts_equal_the_specification_but_for_roundings_at_their_border(jax_ops: Any, vocab: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, draw = rows_of_logits(rng, vocab, rounded=seed % 2 == 0), random_draw(rng, vocab)
    scaled = sampling.scale_logits(logits, draw.temperature)
    torch.testing.assert_close(jax_ops(sampling.scale_logits, logits, draw.temperature), scaled)
    kept = torch.isfinite(jax_ops(sampling.filter_logits, scaled, draw, vocab))
    margin = 1e-5
    tight = draw._replace(top_p=torch.where(draw.top_p < 1, draw.top_p - margin, 1.0), min_p=draw.min_p * (1 + margin))
    loose = draw._replace(
        top_p=torch.where(draw.top_p < 1, (draw.top_p + margin).clamp(max=1 - 1e-7), 1.0),
        min_p=draw.min_p * (1 - margin),
    )
    fewest, most = (torch.isfinite(sampling.filter_logits(scaled, each, vocab)) for each in (tight, loose))
    assert not (fewest & ~kept).any() and not (kept & ~most).any()


def test_cuts_keep_what_is_equal_and_the_likeliest(jax_ops: Any) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -1.0, -2.0, NEVER], [5, 4, 3, 2, 1, 0]])
    off = random_draw(torch.Generator(), 6, 3)._replace(
        top_p=torch.ones(3), min_p=torch.zeros(3), top_k=torch.zeros(3).int()
    )
    by_k = off._replace(top_k=torch.tensor([2, 1, 99], dtype=torch.int32))
    by_p = off._replace(top_p=torch.tensor([0.5, 0.1, 0.0]))
    wanted = [[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    kept_k = torch.isfinite(jax_ops(sampling.filter_logits, logits, by_k, 6)).int().tolist()
    kept_p = torch.isfinite(jax_ops(sampling.filter_logits, logits, by_p, 6)).int().tolist()
    assert kept_k == [*wanted, [1] * 6]
    assert kept_p == [*wanted, [1, 0, 0, 0, 0, 0]]
    assert torch.equal(jax_ops(sampling.filter_logits, logits, off, 6), logits)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [7, 1000, 9001])
def test_draws_equal_the_specification(jax_ops: Any, vocab: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, draw = rows_of_logits(rng, vocab, rounded=seed % 2 == 0), random_draw(rng, vocab)
    logits = broken(logits) if seed % 3 == 0 else logits
    assert torch.equal(jax_ops(sampling.sample, logits, draw, vocab), sampling.sample(logits, draw, vocab))
    uncut = draw._replace(top_k=torch.zeros_like(draw.top_k), top_p=torch.ones_like(draw.top_p))
    assert torch.equal(jax_ops(sampling.sample, logits, uncut, 0), sampling.sample(logits, uncut, 0))


@pytest.mark.grid
@pytest.mark.parametrize("num", [0, 1, 32, 900])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_logprobs_equal_the_specification(jax_ops: Any, num: int, normalize: bool, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(num)
    logits = rows_of_logits(rng, 900).to(dtype)
    logits[6] = float("nan")
    tokens = torch.tensor([0, 5, 899, 3, -1, 7, 8, 77], dtype=torch.int32)
    wanted = torch.tensor([1, 0, 1, 2, 1, 1, 0, 1], dtype=torch.int32)
    got = jax_ops(sampling.top_logprobs, logits, tokens, num, normalize, wanted)
    want = sampling.top_logprobs(logits, tokens, num, normalize, wanted)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_edits_equal_the_specification(jax_ops: Any, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = rows_of_logits(rng, 333)
    rows, ids = (x.int() for x in torch.nonzero(torch.rand(8, 333, generator=rng) < 0.3).unbind(1))
    again = torch.cat([torch.arange(len(rows)), torch.full((50,), len(rows) - 1)])  # repeated to fill a shape
    counts, values = torch.randint(0, 4, rows.shape, generator=rng).int(), torch.randn(len(rows), generator=rng)
    extras = {
        "penalize": ((counts, counts[again]), (torch.rand(8, 3, generator=rng) + 0.5,)),
        "bias_tokens": ((values, values[again]), ()),
        "ban_tokens": (None, ()),
    }
    for name, (column, rest) in extras.items():
        op, short, long = Op.registry[name], *(((column[0],), (column[1],)) if column else ((), ()))
        want = op(logits.clone(), rows, ids, *short, *rest)
        torch.testing.assert_close(
            jax_ops(op, logits, rows[again], ids[again], *long, *rest), want, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("vocab", [1, 31, 32, 100])
def test_kept_tokens_equal_the_specification(jax_ops: Any, vocab: int) -> None:
    logits = torch.randn(5, vocab)
    bits = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), generator=torch.Generator().manual_seed(vocab)).int()
    bits[1] = -1
    assert torch.equal(jax_ops(sampling.keep_tokens, logits, bits), sampling.keep_tokens(logits, bits))


@pytest.mark.parametrize("seed", range(4))
def test_padded_rows_change_no_other(jax_ops: Any, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, draw = rows_of_logits(rng, 500), random_draw(rng, 500)
    off = Draw(*(torch.tensor([value]) for value in (0.0, 0, 1.0, 0.0)), torch.zeros(1, 2), torch.zeros(1))
    padding = torch.full((8, 500), float("nan"))
    padded = Draw(*(torch.cat([x, o.to(x.dtype).expand(8, *x.shape[1:])]) for x, o in zip(draw, off, strict=True)))
    whole = torch.cat([logits, padding])
    for width in (0, 500):
        assert torch.equal(
            jax_ops(sampling.sample, whole, padded, width)[:8], jax_ops(sampling.sample, logits, draw, width)
        )
    tokens, every = torch.arange(16).int(), torch.ones(16).int()
    found = jax_ops(sampling.top_logprobs, whole, tokens, 32, True, every)
    alone = jax_ops(sampling.top_logprobs, logits, tokens[:8], 32, True, every[:8])
    assert torch.equal(found[0][:8], alone[0]) and torch.equal(found[2][:8], alone[2])
    torch.testing.assert_close(found[1][:8], alone[1], rtol=1e-6, atol=1e-5)  # another shape may add up otherwise


@pytest.mark.parametrize("name", sorted({"gumbel", "greedy", "scale_logits", "filter_logits", "sample", "top_logprobs",
                                         "widen", "penalize", "bias_tokens", "ban_tokens", "keep_tokens"}))  # fmt: skip
def test_every_provider_lowers_for_a_tpu(device: Any, name: str) -> None:
    import jax

    from quintet.platforms.tpu.kernels import sampling as kernels

    rows, vocab = 16, 1000

    def shape(*of: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(of, dtype)

    row, floats = shape(rows), shape(rows, dtype="float32")
    logits, places = shape(rows, vocab, dtype="float32"), (shape(1024), shape(1024))
    draw = Draw(floats, row, floats, floats, shape(rows, 2), row)
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "gumbel": [(draw.keys, row, shape(1, vocab))],
        "greedy": [(logits,), (shape(rows, vocab, dtype="bfloat16"),)],
        "scale_logits": [(logits, floats)],
        "filter_logits": [(logits, draw, 0), (logits, draw, vocab)],
        "sample": [(logits, draw, 0), (logits, draw, vocab)],
        "top_logprobs": [(logits, row, num, True, row) for num in (0, 32, vocab)],
        "widen": [(shape(rows, vocab, dtype="bfloat16"), rows, True)],
        "penalize": [(logits, *places, shape(1024), shape(rows, 3, dtype="float32"))],
        "bias_tokens": [(logits, *places, shape(1024, dtype="float32"))],
        "ban_tokens": [(logits, *places)],
        "keep_tokens": [(logits, shape(rows, 32))],
    }
    for args in arguments[name]:
        static = [i for i, arg in enumerate(args) if isinstance(arg, int)]
        lowered = jax.jit(getattr(kernels, name), static_argnums=static).trace(*args).lower(lowering_platforms=("tpu",))
        assert "stablehlo" in lowered.as_text() or "func.func" in lowered.as_text()


class Mirror:
    """One mix of requests, sampled twice: unpadded by the CPU's providers, and on the device, padded."""

    def __init__(self, device: Any, mode: str, seed: int) -> None:
        self.device, self.rng = device, random.Random(seed)
        mirror = random.Random(seed)
        self.requests = [random_request(self.rng, str(i)) for i in range(12)]
        self.mirrors = [random_request(mirror, str(i)) for i in range(12)]
        for number in range(3):  # some name tokens, each a number of their own
            for each in (self.requests[number], self.mirrors[number]):
                each.params.logprob_token_ids = list(range(5, 6 + number))
        self.host = Sampler(bound(HOST), HostDevice(), VOCAB, logprobs_mode=mode)
        self.sampler = Sampler(bound("jax"), device, VOCAB, logprobs_mode=mode, sizes=SIZES)

    def upload(self, logits: torch.Tensor, size: int) -> torch.Tensor:
        padded = torch.full((size, VOCAB), float("nan"))
        padded[: len(logits)] = logits
        return self.device.to_device([padded.numpy()])[0]

    def step(self, size: int) -> tuple[list[int], list[int]]:
        """A step of some of the requests in some order, in a bucket of `size` rows: the device's tokens, the CPU's."""
        chosen = self.rng.sample(range(12), self.rng.randrange(1, min(12, size)))
        mine, theirs = [self.requests[i] for i in chosen], [self.mirrors[i] for i in chosen]
        logits = torch.stack([logits_of(r.request_id, len(r.token_ids)) for r in mine])
        tokens, logprobs = self.sampler(self.upload(logits, size), mine)
        wanted, wanted_logprobs = self.host(logits, theirs)
        count = len(mine)
        assert tokens.shape == (size,)
        for mirrored in (mine, theirs):
            for r, token in zip(mirrored, wanted.tolist(), strict=True):
                r.token_ids.append(token)
        assert (logprobs is None) == (wanted_logprobs is None)
        if logprobs is not None:
            ids, values, ranks = (self.device.to_host(x)()[:count] for x in logprobs[:3])
            num = wanted_logprobs.token_ids.shape[1]
            self.compare((ids[:, :num], values[:, :num], ranks), wanted_logprobs)
            for ours, theirs_named in zip(logprobs.named, wanted_logprobs.named, strict=True):
                found = self.device.to_host(ours)()[:count]
                torch.testing.assert_close(found, theirs_named, rtol=1e-5, atol=1e-4)
        return self.device.to_host(tokens)()[:count].tolist(), wanted.tolist()

    def compare(self, found: Any, wanted: Any) -> None:
        """Values to a few roundings; ids and ranks of equal ones may have changed places by these."""
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-4)
        same = (found[0] == wanted[0]).float().mean()
        assert float(same) > 0.98 and bool(((found[2] - wanted[2]).abs() <= 2).all())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_mixed_requests_get_the_tokens_that_the_cpu_platform_draws(device: Any, mode: str) -> None:
    for seed in range(4):
        mirror = Mirror(device, mode, seed)
        for _ in range(12):
            found, wanted = mirror.step(mirror.rng.choice([8, 16]))
            assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:3])  # each of a mode's two words once: the others are made of the same ops
def test_nothing_compiles_after_the_warm_up(device: Any, mode: str) -> None:
    compiled = compilations()
    mirror = Mirror(device, mode, 99)
    sizes = (20 + MODES.index(mode), 40 + MODES.index(mode))  # that no other test has compiled for
    for size in sizes:
        mirror.sampler.warm_up(mirror.upload(torch.zeros(0, VOCAB), size))
    assert compiled
    compiled.clear()
    for _ in range(12):
        mirror.step(mirror.rng.choice(sizes))
        score(mirror, mirror.rng.choice(sizes))
    assert compiled == []


def score(mirror: Mirror, size: int) -> None:
    """Prompt log-probabilities of a few rows."""
    rng, logits = mirror.rng, torch.randn(size, VOCAB)
    own, wanted = np.zeros((2, size), np.int32)
    own[3:7], wanted[3:7] = rng.randrange(VOCAB), 1
    num = rng.choice([0, 1, 7, 100, -1])
    found = mirror.sampler.prompt_logprobs(mirror.upload(logits, size), own, wanted, num)
    theirs = mirror.host.prompt_logprobs(logits, own, wanted, num)
    columns = theirs.token_ids.shape[1]
    ids, values, ranks = (mirror.device.to_host(x)() for x in found[:3])
    mirror.compare((ids[:, :columns], values[:, :columns], ranks), theirs)


def test_torch_cannot_look_into_the_logits(device: Any) -> None:
    """Otherwise the tests above would not show that the sampler keeps to ops."""
    (logits,) = device.to_device([np.zeros((4, VOCAB), np.float32)])
    for touch in (lambda: logits + 1, lambda: logits[:2], logits.half, logits.clone, lambda: logits.argmax(-1)):
        with pytest.raises(AssertionError, match="torchax environment"):
            touch()


ASKS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 1.3, "seed": 4, "top_k": 7, "n": 2},
    {"temperature": 1.0, "seed": 5, "top_p": 0.8, "frequency_penalty": 0.5, "logprobs": 20},
    {"temperature": 0.7, "seed": 6, "min_p": 0.05, "repetition_penalty": 1.3, "bad_words": []},
    {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 4, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 7, "allowed_token_ids": [4, 5, 9, 33, 60], "prompt_logprobs": 20},
]


def engine(device: str, **settings: Any) -> EngineClient:
    own = {"compilation_cache_dir": programs().name} if device == "tpu" else {}
    config = EngineConfig.from_kwargs(
        model=str(variant("llama", "plain").folder), device=device, dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, num_pages=40, max_num_seqs=4, max_num_batched_tokens=32, **own, **settings,
    )  # fmt: skip
    return EngineClient(config, progress=False)


def answers(client: EngineClient) -> list[Any]:
    """The tokens of every completion, and the tokens and ranks of the prompts' log-probabilities."""
    for index, ask in enumerate(ASKS):
        params = SamplingParams(max_tokens=9, detokenize=False, **ask)
        client.add(str(index), Prompt([3 + (7 * index + place) % 50 for place in range(4 + 5 * index)]), params)
    outputs = drain(client)
    shown = []
    for index in range(len(ASKS)):
        output = outputs[str(index)]
        ranks = [each and {token: found.rank for token, found in each.items()} for each in output.prompt_logprobs or ()]
        shown.append(([list(completion.token_ids) for completion in output.outputs], ranks))
    return shown


@pytest.mark.slow
def test_an_engine_gives_the_cpu_platforms_answers_and_compiles_nothing_once_it_has_started() -> None:
    client, compiled = engine("tpu"), compilations()
    assert answers(client) == answers(engine("cpu"))
    assert compiled == []


class Prefers(RequestLogitsProcessor):
    """Torch code of a user's: token 11 gains, and requests of seed 6 fail."""

    def for_request(self, params: SamplingParams) -> Any:
        def function(prompt_ids: Any, output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
            if params.seed == 6 and len(output_ids) == 2:
                raise ValueError("seed 6")
            logits[11] += 1.5
            return logits

        return function


@pytest.mark.slow
def test_logits_processors_run_on_the_host_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    client = engine("tpu", logits_processors=[Prefers])
    assert [record.message for record in caplog.records if "on the host" in record.message] == [
        "sampling on the host: Prefers computes with torch, which cannot on what this device holds"
    ]
    compiled = compilations()
    assert answers(client) == answers(engine("cpu", logits_processors=[Prefers]))
    assert compiled == []
