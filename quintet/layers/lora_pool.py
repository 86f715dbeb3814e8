"""Room on the device for several adapters (LoRA): beside a product, and beside a table of embeddings."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import ColumnParallelLinear
from quintet.layers.lora_step import LoRASizes

BLOCK = 2**20  # numbers of a weight that are widened at a time, for the norms of its rows
ReadWeight = Callable[[Weight], Tensor]  # a weight as the checkpoint has it, in floats
Tensors = dict[str, Tensor]
# their last axis but one has an adapter's rows, and what is beyond its rank is not read
RANKED = ("lora_a", "lora_b", "gate_up_a", "gate_up_b", "down_a", "down_b")


class LoRAMatrices(NamedTuple):
    """Change of one module by an adapter, to which it adds x A^T B^T; on the host, whole."""

    lora_a: Tensor  # [r, K]; of an embedding [r, V]
    lora_b: Tensor  # [N, r], scaled
    magnitude: Tensor | None = None  # [N], DoRA's: norms that the rows of W + B A get; of an embedding, its columns
    bias: Tensor | None = None  # [N], scaled: what is added to the product
    embedding: bool = False

    @property
    def has_extras(self) -> bool:
        """True if it has more than the A and B of a product."""
        return self.embedding or self.magnitude is not None or self.bias is not None


class PoolTensor(NamedTuple):
    """A tensor of a pool: S times so much, along its first axis."""

    shape: tuple[int, ...]  # of one adapter
    dtype: torch.dtype


class LoRARanks(Layer):
    """Rows that adapters have in each part of all pools."""

    ranks: Tensor  # [S, M] int32


class LoRAPool(Layer):
    """Room for S adapters beside one layer."""

    modules_here: tuple[str, ...]  # modules of the checkpoint that the layer computes: the parts of the pool
    lora_a: Tensor
    lora_b: Tensor  # [S, R, N]
    gains: Tensor  # [S, N] float32
    offsets: Tensor  # [S, N] float32

    def __init__(self, build: BuildContext, path: str, ranks: LoRARanks, *ops: str) -> None:
        super().__init__(build, "add_lora", "scale_adapted", *ops)
        assert build.lora is not None, "pools are for models with adapters"
        self._step, self._rank, self._dtype, self.path = build.lora, build.rank, build.dtype, path
        self.first = 0  # its column of the ranks
        self._rows = (ranks,)  # a module of the model, and none of this one: it stands in a tuple

    @property
    def num_columns(self) -> int:
        """Columns that it has of the ranks."""
        return len(self.modules_here)

    @abstractmethod
    def tensors(self, sizes: LoRASizes) -> dict[str, PoolTensor]:
        """Returns its tensors."""

    @abstractmethod
    def pack(
        self,
        adapter: Mapping[str, LoRAMatrices],
        sizes: LoRASizes,
        ranks: Tensor,
        read: ReadWeight | None,
        has_extras: bool,
    ) -> Tensors:
        """Returns an adapter's share of the tensors for this rank, and enters its rows into `ranks` [M]. ValueError
        names a module whose matrices do not fit. `read`: None where only that is checked. `has_extras`: the adapter
        has more than the A and B of products, here or beside another layer."""

    def _extras(self, sizes: LoRASizes) -> Tensors:
        """Gains and offsets that change nothing."""
        shapes = self.tensors(sizes)
        return {"gains": torch.ones(shapes["gains"].shape), "offsets": torch.zeros(shapes["offsets"].shape)}

    def _scaled(self, y: Tensor) -> Tensor:
        if self._step.extras is None:
            return y
        held = self._parameters
        out: Tensor = self.ops.scale_adapted(y, held["gains"], held["offsets"], self._step.extras)
        return out

    def _check_rank(self, module: str, matrices: LoRAMatrices, sizes: LoRASizes) -> None:
        if len(matrices.lora_a) > sizes.max_rank:
            raise ValueError(
                f"{module}: the adapter has rank {len(matrices.lora_a)}, and max_lora_rank is {sizes.max_rank}; raise "
                f"it to {len(matrices.lora_a)} or more"
            )


class ProductPool(LoRAPool):
    """Room beside a product. Its parts are the modules of the checkpoint that the product computes: q, k and v have an
    A of their own each, and the columns of B are the product's outputs."""

    def __init__(self, build: BuildContext, product: ColumnParallelLinear, path: str, ranks: LoRARanks) -> None:
        super().__init__(build, path, ranks)
        self._slices = product.output_slices(path)
        self._base = tuple(product.base_weights(path))
        self._adds_bias = build.rank == 0 or not product.sums_over_ranks  # of what is summed, one rank's share has it
        self.modules_here = tuple(dict.fromkeys(module_of(part) for part in self._slices))
        self._inputs = product.inputs
        self.columns = tuple(
            (self.modules_here.index(module_of(part)), width_of(part, build.rank)) for part in self._slices
        )

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T, N] and what each row's adapter changes; x [T, K]."""
        y = self._scaled(y)
        held, ranks = self._parameters, self._rows[0].ranks
        out: Tensor = self.ops.add_lora(
            y, x, held["lora_a"], held["lora_b"], ranks, self._step.slots, self.first, self.columns
        )
        return out

    def tensors(self, sizes: LoRASizes) -> dict[str, PoolTensor]:
        start, stop = self._inputs.ranges[self._rank]
        outputs = sum(width for _, width in self.columns)
        parts, rank = len(self.modules_here), sizes.max_rank
        return {
            "lora_a": PoolTensor((1, parts, rank, stop - start), self._dtype),
            "lora_b": PoolTensor((1, rank, outputs), self._dtype),
            "gains": PoolTensor((1, outputs), torch.float32),
            "offsets": PoolTensor((1, outputs), torch.float32),
        }

    def pack(
        self,
        adapter: Mapping[str, LoRAMatrices],
        sizes: LoRASizes,
        ranks: Tensor,
        read: ReadWeight | None,
        has_extras: bool,
    ) -> Tensors:
        given = {module: adapter[module] for module in self.modules_here if module in adapter}
        packed = self._extras(sizes) if has_extras else {}
        if not given:
            return packed
        shapes = self.tensors(sizes)
        a, b = (torch.zeros(shapes[name].shape, dtype=self._dtype) for name in ("lora_a", "lora_b"))
        start, stop = self._inputs.ranges[self._rank]
        for module, matrices in given.items():
            self._check(module, matrices, sizes)
            part, rows = self.modules_here.index(module), len(matrices.lora_a)
            ranks[self.first + part] = rows
            a[0, part, :rows] = matrices.lora_a[:, start:stop]
        for number, columns in enumerate(self._columns()):
            if (matrix := given.get(module_of(self._slices[number]))) is None:
                continue
            lora_b = self._cut(number, matrix.lora_b)
            if matrix.magnitude is not None:
                gains = packed["gains"][0, columns] = self._gains(number, matrix, lora_b, read)
                packed["offsets"][0, columns] = (1 - gains) * self._bias(number, read)
                lora_b = lora_b * gains[:, None]
            if matrix.bias is not None and self._adds_bias:
                packed["offsets"][0, columns] += self._cut(number, matrix.bias[:, None].float())[:, 0]
            b[0, : lora_b.shape[1], columns] = lora_b.t()
        return {"lora_a": a, "lora_b": b, **packed}

    def _columns(self) -> Iterator[slice]:
        """Yields the columns of each slice."""
        start = 0
        for _, width in self.columns:
            yield slice(start, start + width)
            start += width

    def _cut(self, number: int, matrix: Tensor) -> Tensor:
        """This rank's rows of a matrix with as many as a module has outputs."""
        return local_share(self._slices[number], matrix, 0, self._rank)

    def _gains(self, number: int, matrix: LoRAMatrices, lora_b: Tensor, read: ReadWeight | None) -> Tensor:
        """Factors that give the rows of W + B A here the norms of `matrix.magnitude`."""
        assert matrix.magnitude is not None
        wanted = self._cut(number, matrix.magnitude[:, None].float())[:, 0]
        if read is None:
            return wanted
        weight, lora_a = read(self._base[number][0]), matrix.lora_a.float()
        rows = max(1, BLOCK // weight.shape[1])
        norms = [
            (weight[at : at + rows].float() + lora_b[at : at + rows] @ lora_a).norm(dim=1)
            for at in range(0, len(weight), rows)
        ]
        return _over(wanted, torch.cat(norms))

    def _bias(self, number: int, read: ReadWeight | None) -> Tensor | float:
        """The product's own bias, which DoRA leaves as it is."""
        bias = self._base[number][1]
        return 0.0 if bias is None or read is None else read(bias).float()

    def _check(self, module: str, matrices: LoRAMatrices, sizes: LoRASizes) -> None:
        a, b = matrices.lora_a, matrices.lora_b
        outputs = next(part.total or part.shape[0] for part in self._slices if module_of(part) == module)
        if matrices.embedding:
            raise ValueError(f"{module}: the adapter changes it as an embedding, and it is a product; save it again")
        if a.shape[1] != self._inputs.total or b.shape[0] != outputs:
            raise ValueError(
                f"{module}: the adapter's A is {list(a.shape)} and B {list(b.shape)}, and the product has "
                f"{self._inputs.total} inputs and {outputs} outputs; it was made for another model"
            )
        self._check_rank(module, matrices, sizes)


class EmbeddingPool(LoRAPool):
    """Room beside the embedding of tokens: a row of A^T for each of this rank's tokens, and B. The product of a row
    with B is add_lora()'s, with the unit matrix in the place of A."""

    table: Tensor  # [S V, R]
    identity: Tensor  # [S, 1, R, R]

    def __init__(
        self, build: BuildContext, embedding: VocabParallelEmbedding, path: str, ranks: LoRARanks, sizes: LoRASizes
    ) -> None:
        super().__init__(build, path, ranks, "embedding", "adapter_rows")
        self.modules_here, self._sizes = (path,), sizes
        self._shard, self._total = embedding.shards.ranges[build.rank], embedding.shards.total
        self._base, self._width = embedding.base_weight(path), embedding.width
        self.columns = ((0, self._width),)

    def forward(self, y: Tensor, ids: Tensor) -> Tensor:
        """y [T, H] and what each row's adapter changes; ids [T]."""
        held, (first, stop) = self._parameters, self._shard
        rows = self.ops.adapter_rows(ids, self._step.extras, self._sizes.max_loras, stop - first, first)
        low = self.ops.embedding(rows, held["table"], 0, True)
        out: Tensor = self.ops.add_lora(
            self._scaled(y), low, held["identity"], held["lora_b"], self._rows[0].ranks, self._step.extras, self.first,
            self.columns,
        )  # fmt: skip
        return out

    def constants(self) -> Mapping[str, Tensor]:
        size = self._sizes.max_rank
        return {"identity": torch.eye(size, dtype=self._dtype).expand(self._sizes.max_loras, 1, size, size).clone()}

    def tensors(self, sizes: LoRASizes) -> dict[str, PoolTensor]:
        first, stop = self._shard
        return {
            "table": PoolTensor((stop - first, sizes.max_rank), self._dtype),
            "lora_b": PoolTensor((1, sizes.max_rank, self._width), self._dtype),
            "gains": PoolTensor((1, self._width), torch.float32),
            "offsets": PoolTensor((1, self._width), torch.float32),
        }

    def pack(
        self,
        adapter: Mapping[str, LoRAMatrices],
        sizes: LoRASizes,
        ranks: Tensor,
        read: ReadWeight | None,
        has_extras: bool,
    ) -> Tensors:
        packed = self._extras(sizes) if has_extras else {}
        matrices = adapter.get(self.path)
        if matrices is None:
            return packed
        self._check(matrices, sizes)
        lora_b, rank, (first, stop) = matrices.lora_b, len(matrices.lora_a), self._shard
        if matrices.magnitude is not None:
            packed["gains"][0] = gains = self._gains(matrices, read)
            lora_b = lora_b * gains[:, None]
        shapes = self.tensors(sizes)
        table, b = (torch.zeros(shapes[name].shape, dtype=self._dtype) for name in ("table", "lora_b"))
        ranks[self.first] = rank
        mine = matrices.lora_a[:, first:stop].t()  # the last rank's table may be longer than the vocabulary
        table[: len(mine), :rank] = mine.to(self._dtype)
        b[0, :rank] = lora_b.t().to(self._dtype)
        return {"table": table, "lora_b": b, **packed}

    def _gains(self, matrices: LoRAMatrices, read: ReadWeight | None) -> Tensor:
        """Factors that give the columns of W + (B A)^T the norms of `matrices.magnitude`."""
        assert matrices.magnitude is not None
        if read is None:
            return matrices.magnitude.float()
        weight, lora_a = read(self._base), matrices.lora_a.float()
        rows, squares = max(1, BLOCK // self._width), torch.zeros(self._width)
        for at in range(0, len(weight), rows):
            merged = weight[at : at + rows].float() + lora_a[:, at : at + rows].t() @ matrices.lora_b.t()
            squares += merged.square().sum(0)
        return _over(matrices.magnitude.float(), squares.sqrt())

    def _check(self, matrices: LoRAMatrices, sizes: LoRASizes) -> None:
        a, b = matrices.lora_a, matrices.lora_b
        if not matrices.embedding:
            raise ValueError(f"{self.path}: the adapter changes it as a product, and it is an embedding; save it again")
        if a.shape[1] != self._total or b.shape[0] != self._width:
            raise ValueError(
                f"{self.path}: the adapter's A is {list(a.shape)} and B {list(b.shape)}, and the embedding has "
                f"{self._total} rows of {self._width} numbers; it was made for another model or vocabulary"
            )
        self._check_rank(self.path, matrices, sizes)


def _over(wanted: Tensor, norms: Tensor) -> Tensor:
    """wanted / norms; rows of zeros, which fill up a vocabulary, stay."""
    return torch.where(norms > 0, wanted / norms, 1.0)


def local_share(part: CheckpointSlice, matrix: Tensor, axis: int, rank: int) -> Tensor:
    """Returns a rank's share of a matrix that is as long as the weight along this axis, which is shared out."""
    shape = (part.shape[0], matrix.shape[1]) if axis == 0 else (matrix.shape[0], part.shape[1])
    cut = replace(part, shape=shape, transposed=False)
    return Weight("share", (cut,), axis, rank, matrix.dtype, "vector").local({part.source: matrix})


def module_of(part: CheckpointSlice) -> str:
    """Returns the module of the checkpoint that the weight is of."""
    return part.source.removesuffix(".weight")


def width_of(part: CheckpointSlice, rank: int) -> int:
    """Returns a rank's share of the slice, along its shard axis."""
    start, stop = part.ranges[rank]
    return stop - start
