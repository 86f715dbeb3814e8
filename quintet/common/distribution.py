"""The name of quintet's distribution on the package index, and how it or one of its extras is installed."""

import importlib.metadata
import json
import shlex

DISTRIBUTION = "quintet-llm"  # "quintet" on the index is another project


def install_hint(extra: str = "") -> str:
    """Returns the command that installs quintet, with an extra if one is given: from the index, or from the checkout
    that this process runs from."""
    source = checkout() or DISTRIBUTION
    return f"pip install '{source}[{extra}]'" if extra else f"pip install {shlex.quote(source)}"


def checkout() -> str | None:
    """Returns the folder that was installed with `pip install -e`; None for a wheel."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # run from sources, which are on the path
        return "."
    found = json.loads(text or "{}")
    editable = found.get("dir_info", {}).get("editable", False)
    return str(found["url"]).removeprefix("file://") if editable else None
