"""Page of the model types that `quintet try --all` compared with transformers."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.reference_pages.markdown import cell, code, table

RESULTS = Path(__file__).parents[2] / "conformance" / "tried_models.json"
INTRO = """
Small random copies of the causal model types, encoders and encoder-decoders of transformers {version}, by the default
config of each type, here on the CPU and in transformers, in float32, with two prompts of 5 and 19 tokens: 12 greedy
tokens behind each and their log-probabilities (to 0.005), or an encoder's hidden states (to 0.001 of their standard
deviation). No published checkpoint was run. Written by

```text
quintet try --all --json > conformance/tried_models.json
python scripts/reference.py
```

- *native*: a file of `quintet/models` runs it.
- *backend*: [transformers' own code](../transformers-backend.md) runs it on quintet's engine.
- *refused*: quintet does not run it, for the reason in the last column.
- *no copy*: transformers makes or runs no small copy of its default config, so that quintet was not tried.
- *not run*: the time of the whole trial was over.

A small copy has all kinds of layers that the default config has, at most six layers, and prompts longer than its
windows. Settings that the default config leaves out are not tried: `quintet try MODEL` tries those of a model's own
config.json. `COMPLETED` in `quintet/api/trial/all_types.py` completes the default configs of `deepseek_v2`, `dots1`,
`lfm2_moe` and `esm`, which transformers cannot build alone.

"""


def tried_page(note: str) -> str:
    """The page, of the results that are kept in the repository."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    results = found["results"]
    counts = Counter(_outcome(result) for result in results)
    rows = [[name, str(count)] for name, count in sorted(counts.items(), key=lambda each: -each[1])]
    lines = [
        [
            code(result["model"]),
            _text_type(result),
            result["verdict"],
            _compared(result),
            _equality(result),
            cell(result["reason"]),
        ]
        for result in results
    ]
    text = "# Model types that were tried\n\n" + note + INTRO.format(version=found["transformers"])
    head = ["type", "text model", "run by", "compared", "equal", "reason"]
    return text + table(["outcome", f"of {len(results)} types"], rows) + "\n" + table(head, lines)


def _outcome(result: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, [result["verdict"], _equality(result)]))


def _compared(result: Mapping[str, Any]) -> str:
    return "" if result["equal"] is None else result["compared"]


def _equality(result: Mapping[str, Any]) -> str:
    return {True: "equal", False: "not equal", None: ""}[result["equal"]]


def _text_type(result: Mapping[str, Any]) -> str:
    return "" if result["model"] == result["model_type"] else code(result["model_type"])
