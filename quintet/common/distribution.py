"""The name of quintet's distribution on the package index, and how one of its extras is installed."""

import importlib.metadata
import json

DISTRIBUTION = "quintet-llm"  # "quintet" on the index is another project


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra: from the index, or from the checkout that this process runs from."""
    checkout = _checkout()
    return f"pip install '{checkout or DISTRIBUTION}[{extra}]'"


def _checkout() -> str | None:
    """Returns the folder that was installed with `pip install -e`; None for a wheel."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # run from sources, which are on the path
        return "."
    found = json.loads(text or "{}")
    editable = found.get("dir_info", {}).get("editable", False)
    return str(found["url"]).removeprefix("file://") if editable else None
