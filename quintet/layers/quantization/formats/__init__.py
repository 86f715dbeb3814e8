"""One module for each checkpoint format of quantized weights (GPTQ, AWQ, compressed-tensors, GGUF, ...)."""
