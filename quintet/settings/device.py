"""On what a model runs, and what the device does with its steps before they run."""

from dataclasses import dataclass

from quintet.settings.option import option
from quintet.values import count, text, truth


@dataclass(frozen=True)
class DeviceOptions:
    """Where steps run, and how."""

    device: str = option("auto", text, "platform to run on, or auto: `quintet platforms` lists them", group="device")
    tensor_parallel_size: int = option(1, count(), "devices that share each layer", group="device", flags=("-tp",))
    enforce_eager: bool = option(False, truth, "run the model without capturing or compiling it", group="device")
    capture_ahead: bool = option(
        False, truth, "capture every decode step before serving, on platforms that do; else each when it first comes",
        group="device",
    )  # fmt: skip
    compilation_cache_dir: str = option(
        "auto", text, "where a platform that compiles keeps what it compiled, for the next start: a folder, auto "
        "(~/.cache/quintet) or none", group="device", metavar="FOLDER",
    )  # fmt: skip

    def _check(self) -> None:
        if self.capture_ahead and self.enforce_eager:
            raise ValueError(
                "enforce_eager=True captures nothing, so capture_ahead=True means nothing; give one of them"
            )
