"""The page of vLLM's names (scripts/reference.py)."""

import json
from pathlib import Path

from scripts.reference_pages.markdown import code, table
from scripts.vllm_names.ours import ROOT, has, refused

FILE = ROOT / "conformance" / "vllm_names.json"
INTRO = """
How many of vLLM {version}'s public names there are here, counted by name alone: whether a thing works as in vLLM is
in [vllm.md](../vllm.md), and tests show it. *Same*: under the same name. *Refused*: by that name, with what to do
instead. The names are read from vLLM's sources (`scripts/vllm_names/theirs.py`) and stand in
`conformance/vllm_names.json`. An architecture counts where transformers has a class of the name whose `model_type` is
served ([models.md](../models.md)), or where the code or a test that runs a checkpoint names it. Others count as
missing, those among them that are served under another name.

"""


def vllm_page(note: str, file: Path = FILE) -> str:
    """Returns the page: counts by group, then the names that are not here."""
    found = json.loads(file.read_text())
    rows, missing = [], []
    for group, names in found["names"].items():
        same = [name for name in names if has(group, name)]
        reasoned = [name for name in names if name not in same and refused(group, name)]
        left = [name for name in names if name not in same and name not in reasoned]
        rows.append([group, str(len(names)), str(len(same)), str(len(reasoned)), str(len(left))])
        if left:
            missing.append(f"- {group}: {', '.join(map(code, left))}\n")
    counts = table(["names of", "vLLM", "same", "refused", "missing"], rows)
    intro = INTRO.format(version=found["vllm"])
    return f"# vLLM's names\n\n{note}{intro}{counts}\n## Missing\n\n{''.join(missing)}"
