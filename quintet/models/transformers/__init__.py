"""The Transformers backend: a model runs through transformers' own modeling code, on our cache and layers."""

from quintet.models.transformers.model import TransformersEncoder, TransformersForCausalLM, backend_class

__all__ = ["TransformersEncoder", "TransformersForCausalLM", "backend_class"]
