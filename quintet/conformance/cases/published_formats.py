"""Forms in which quantized checkpoints are published, as canonical matrices hold them, by what publishes them."""

import torch

from quintet.interface.weights import WeightFormat
from quintet.layers.quantization.formats.bitsandbytes import NF4
from quintet.layers.quantization.fp4_fp8 import E2M1, E2M3

E4M3 = torch.float8_e4m3fn

FORMS = {
    "AWQ; GPTQ, AutoRound and W4A16 with zero points": WeightFormat("int4", 4, 16, 128, zeros=True),
    "the same in groups of 32": WeightFormat("int4", 4, 16, 32, zeros=True),
    "GPTQ, AutoRound and W4A16, symmetric; Q4_0 at 16 bits": WeightFormat("int4", 4, 16, 64),
    "GPTQ in an order (desc_act), 4 bits": WeightFormat("int4", 4, 16, 32, zeros=True, act_order=True),
    "GPTQ in an order (desc_act), 8 bits": WeightFormat("int8", 8, 16, 64, act_order=True),
    "GPTQ of 8 bits, W8A16; Q8_0 at 16 bits": WeightFormat("int8", 8, 16, 128),
    "bitsandbytes int8, torchao int8, W8A16 per channel": WeightFormat("int8", 8, 16),
    "HQQ, torchao int4; Q4_1, Q4_K at 16 bits": WeightFormat("int4", 4, 16, 32, mins=True),
    "8 bits with zero points; Q5_K at 16 bits": WeightFormat("int8", 8, 16, 16, mins=True),
    "W8A8, Quark INT8, torchao int8 with dynamic activations": WeightFormat("w8a8", 8, 8),
    "W8A8 with zero points": WeightFormat("w8a8", 8, 8, mins=True),
    "Q8_0, Q6_K": WeightFormat("w8a8", 8, 8, 32),
    "W4A8; Q4_0": WeightFormat("w4a8", 4, 8, 32),
    "W4A8 per channel": WeightFormat("w4a8", 4, 8),
    "W4A8 with zero points": WeightFormat("w4a8", 4, 8, 32, zeros=True),
    "Q4_1, Q4_K": WeightFormat("w4a8", 4, 8, 32, mins=True),
    "MXFP4": WeightFormat("table4", 4, 16, 32, codebook=E2M1),
    "NVFP4": WeightFormat("table4", 4, 16, 16, codebook=E2M1),
    "MXFP4 at 8 bits": WeightFormat("table4", 4, 8, 64, codebook=E2M1),
    "bitsandbytes nf4": WeightFormat("table4", 4, 16, 64, codebook=NF4),
    "MXFP6": WeightFormat("table8", 8, 16, 32, codebook=E2M3),
    "FP8 in blocks": WeightFormat("fp8", 8, 16, 128, dtype=E4M3),
    "FP8 per tensor and channel, FBGEMM, ModelOpt": WeightFormat("fp8", 8, 16, dtype=E4M3),
    "FP8 in blocks, with activations in fp8": WeightFormat("fp8a8", 8, 8, 128, dtype=E4M3),
}
