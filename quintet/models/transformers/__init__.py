"""The Transformers backend: a causal model runs through transformers' own modeling code, on our cache and layers."""

from quintet.models.transformers.model import TransformersForCausalLM

__all__ = ["TransformersForCausalLM"]
