"""Reads vLLM's public names from its sources, which are parsed and not run. To count against another release:

pip download vllm --no-deps && unzip vllm-*.whl
python -m scripts.vllm_names.theirs vllm > conformance/vllm_names.json
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LLM_FILES = (
    "entrypoints/llm.py",
    "entrypoints/common/offline.py",
    "entrypoints/generate/beam_search/offline.py",
    "entrypoints/pooling/offline.py",
    "entrypoints/rl/offline.py",
)
LLM_CLASSES = ("LLM", "OfflineInferenceMixin", "BeamSearchOfflineMixin", "PoolingOfflineMixin", "RLOfflineMixin")
FLAG_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
ARCHITECTURES = {
    "text": ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"),
    "pooling": (
        "_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS",
        "_SEQUENCE_CLASSIFICATION_MODELS",
    ),
    "multimodal": ("_MULTIMODAL_MODELS",),
}  # fmt: skip
_ROUTE = re.compile(r"(?:router|app)\.(?:get|post|put|delete|patch|websocket|api_route)\(\s*\"(/[^\"]*)\"")
_METRIC = re.compile(r'name="(vllm:[a-z0-9_]+)"')
_COMMAND = re.compile(r'^    name = "([a-z-]+)"', re.M)
_CONNECTOR = re.compile(r'register_connector\(\s*"(\w+)"')


class Sources:
    """A folder of vLLM's sources."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.version = self._version()

    def groups(self) -> dict[str, set[str]]:
        """Returns vLLM's names by what they are names of."""
        found = {
            "LLM: methods": self._methods(LLM_FILES, LLM_CLASSES),
            "AsyncLLM: methods": self._methods(["v1/engine/async_llm.py"], ["AsyncLLM"]),
            "exports of the package": self._exports(),
            "SamplingParams": self._fields("sampling_params.py", "SamplingParams"),
            "BeamSearchParams": self._fields("sampling_params.py", "BeamSearchParams"),
            "StructuredOutputsParams": self._fields("sampling_params.py", "StructuredOutputsParams"),
            "RepetitionDetectionParams": self._fields("sampling_params.py", "RepetitionDetectionParams"),
            "PoolingParams": self._fields("pooling_params.py", "PoolingParams"),
            "LateInteractionParams": self._fields("pooling_params.py", "LateInteractionParams"),
            "LateChunkingParams": self._fields("pooling_params.py", "LateChunkingParams"),
            "RequestOutput": self._parameters("outputs.py", "RequestOutput"),
            "CompletionOutput": self._fields("outputs.py", "CompletionOutput"),
            "engine arguments": self._fields("engine/arg_utils.py", "EngineArgs")
            | self._fields("engine/arg_utils.py", "AsyncEngineArgs"),
            "flags of the server": {
                name for each in FLAG_CLASSES for name in self._fields("entrypoints/common/cli_args.py", each)
            },
            "HTTP routes": self._matches("entrypoints", _ROUTE),
            "metrics": self._matches("v1", _METRIC),
            "commands": self._matches("entrypoints/cli", _COMMAND) - {"main"},
            "quantization methods": self._literal(
                "model_executor/layers/quantization/__init__.py", "QuantizationMethods"
            ),
            "KV cache dtypes": self._literal("config/cache.py", "CacheDType"),
            "load formats": self._literal("model_executor/model_loader/__init__.py", "LoadFormats"),
            "speculative methods": self._literal("config/speculative.py", "SpeculativeMethod"),
            "structured output backends": self._literal("config/structured_outputs.py", "StructuredOutputsBackend"),
            "tool parsers": self._keys("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
            "reasoning parsers": self._keys("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
            "KV connectors": self._matches("distributed/kv_transfer/kv_connector/factory.py", _CONNECTOR),
            "plug-in groups": self._plugin_groups(),
            "LoRA settings": self._fields("config/lora.py", "LoRAConfig"),
        }
        for kind, tables in ARCHITECTURES.items():
            found[f"architectures: {kind}"] = {
                name for table in tables for name in self._keys("model_executor/models/registry.py", table)
            }
        return found

    @cache  # noqa: B019  # a script's one object
    def _tree(self, file: str) -> ast.Module:
        return ast.parse((self._folder / file).read_text())

    def _version(self) -> str:
        found = re.search(r"__version__ = version = ['\"]([\d.]+)", (self._folder / "_version.py").read_text())
        if found is None:
            raise SystemExit(f"{self._folder}/_version.py names no version; unzip a wheel of vllm, and name its vllm/")
        return found[1]

    def _class(self, file: str, name: str) -> ast.ClassDef:
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise SystemExit(f"{file} has no class {name}; vLLM has moved it: mend scripts/vllm_names/theirs.py")

    def _methods(self, files: "list[str] | tuple[str, ...]", classes: "list[str] | tuple[str, ...]") -> set[str]:
        found = set()
        for file in files:
            for node in self._tree(file).body:
                if isinstance(node, ast.ClassDef) and node.name in classes:
                    methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
                    found |= {each.name for each in methods if not each.name.startswith("_")}
        return found

    def _fields(self, file: str, name: str) -> set[str]:
        body = self._class(file, name).body
        targets = (each.target for each in body if isinstance(each, ast.AnnAssign))
        return {each.id for each in targets if isinstance(each, ast.Name) and not each.id.startswith("_")}

    def _parameters(self, file: str, name: str) -> set[str]:
        for node in self._class(file, name).body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
        raise SystemExit(f"{name} of {file} has no __init__; mend scripts/vllm_names/theirs.py")

    def _value(self, file: str, name: str) -> ast.expr:
        for node in self._tree(file).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                value = getattr(node, "value", None)
                if isinstance(value, ast.expr):
                    return value
        raise SystemExit(f"{file} does not define {name}; vLLM has moved it: mend scripts/vllm_names/theirs.py")

    def _keys(self, file: str, name: str) -> set[str]:
        value = self._value(file, name)
        keys = value.keys if isinstance(value, ast.Dict) else []
        return {str(each.value) for each in keys if isinstance(each, ast.Constant)}

    def _literal(self, file: str, name: str) -> set[str]:
        return set(self._literals(file, self._value(file, name)))

    def _literals(self, file: str, value: ast.expr) -> Iterator[str]:
        inside = value.slice if isinstance(value, ast.Subscript) else value
        for each in inside.elts if isinstance(inside, ast.Tuple) else [inside]:
            if isinstance(each, ast.Constant):
                yield str(each.value)
            elif isinstance(each, ast.Name):  # another list of names
                yield from self._literals(file, self._value(file, each.id))

    def _exports(self) -> set[str]:
        value = self._value("__init__.py", "__all__")
        assert isinstance(value, ast.List)
        return {str(each.value) for each in value.elts if isinstance(each, ast.Constant)}

    def _matches(self, path: str, pattern: re.Pattern[str]) -> set[str]:
        place = self._folder / path
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        return {name for file in files for name in pattern.findall(file.read_text())}

    def _plugin_groups(self) -> set[str]:
        return set(re.findall(r'_GROUP = "vllm\.(\w+)"', (self._folder / "plugins/__init__.py").read_text()))


def main() -> None:
    """Prints the names of a folder of vLLM's sources, as JSON."""
    sources = Sources(Path(sys.argv[1]))
    groups = {name: sorted(names) for name, names in sources.groups().items()}
    print(json.dumps({"vllm": sources.version, "names": groups}, indent=1))


if __name__ == "__main__":
    main()
