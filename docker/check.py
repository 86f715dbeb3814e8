"""Builds the CPU image without a registry, starts it, and asks it: its size, its user, its health check, a completion.

sudo python docker/check.py [--base IMAGE] [--most 1000] [--torch-index URL] [--wheels FOLDER]

It needs root, buildah, and debootstrap or an image to begin with. Debian and its Python stand in for the base image
that the Dockerfile pins, so what that base brings is not tried here. No container engine runs: buildah does it in a
chroot. Where PyTorch's own index is out of reach, a folder with torch's wheel and another index take its place.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docker" / "Dockerfile.cpu"
PLACE = ROOT / "build" / "image"
STAND_IN, IMAGE = "localhost/quintet-stand-in", "localhost/quintet:check"
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,python3-pip,python3-dev,ca-certificates"
# what Debian's slim images and Python's lack, too
LEFT_OUT = (
    *(f"var/{each}/*" for each in ("cache/apt", "lib/apt/lists")),
    *(f"usr/share/{each}/*" for each in ("doc", "info", "locale", "man")),
    *("usr/lib/**/*.pyc", "usr/lib/**/libpython*.a"),
)
GIVEN = "/opt/wheels"  # where --wheels is seen while the image is built
PATIENCE = 300.0  # seconds until it is healthy
USER = "10001:10001"
ANSWERS = "http://127.0.0.1:8000"


def buildah(*words: str) -> str:
    """-> what it printed; its errors go to the terminal."""
    return subprocess.run(["buildah", *words], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def stand_in() -> str:
    """An image of Debian with the Python of the system, with the certificates and pip's settings of this machine."""
    folder = PLACE / "base"
    if not (folder / "usr" / "bin" / "pip3").exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(folder), MIRROR]
        subprocess.run(command, check=True)
    for name in ("python", "pip"):
        link = folder / "usr" / "bin" / name
        if not link.exists():
            link.symlink_to(f"{name}3")
    for marker in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # the real base's pip installs where it is told
    for path in [path for pattern in LEFT_OUT for path in folder.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", folder / "etc" / "ssl" / "certs")
    settings = "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndisable-pip-version-check = true\n"
    (folder / "etc" / "pip.conf").write_text(f"{settings}find-links = {GIVEN}\n")
    made = buildah("from", "scratch")
    buildah("copy", "--quiet", made, str(folder), "/")
    buildah("commit", "--quiet", made, STAND_IN)
    buildah("rm", made)
    return STAND_IN


def build(base: str, torch_index: str, wheels: Path) -> None:
    mounts = ["--volume", f"{wheels.resolve()}:{GIVEN}:ro"]
    given = ["--build-arg", f"BASE={base}", "--build-arg", f"TORCH_INDEX={torch_index}"]
    command = ["buildah", "build", "--isolation", "chroot", "--layers", *mounts, *given, "-f", str(FILE), "-t", IMAGE]
    subprocess.run([*command, str(ROOT)], check=True)


def size(container: str) -> int:
    """Bytes of the files of a container."""
    mounted = buildah("mount", container)
    try:
        done = subprocess.run(["du", "-s", "-B1", "-x", mounted], check=True, text=True, stdout=subprocess.PIPE)
        return int(done.stdout.split()[0])
    finally:
        buildah("umount", container)


def words_of(image: str, name: str) -> list[str]:
    """An instruction of the image's own, as a list of words."""
    config = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    return list(config[name])


def health() -> list[str]:
    """HEALTHCHECK's command: an image in OCI's format does not keep it, so it is read where it is written."""
    text = FILE.read_text().replace("\\\n", " ")
    line = next(each for each in text.splitlines() if each.startswith("HEALTHCHECK"))
    return list(json.loads(line[line.index("[") :]))


def inside(container: str, *words: str) -> list[str]:
    """A command in the container, as the image's user."""
    return ["buildah", "run", "--isolation", "chroot", "--user", USER, container, "--", *words]


def started(container: str, server: "subprocess.Popen[bytes]") -> float:
    """Seconds until the health check of the image holds."""
    start = time.monotonic()
    while subprocess.run(inside(container, *health()), capture_output=True, check=False).returncode:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        if time.monotonic() - start > PATIENCE:
            raise SystemExit(f"not healthy after {PATIENCE:.0f} s")
        time.sleep(1)
    return time.monotonic() - start


def ready(server: "subprocess.Popen[bytes]") -> float:
    """Seconds until the model is loaded; a server is healthy before it."""
    start = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{ANSWERS}/ready", timeout=5):
                return time.monotonic() - start
        except urllib.error.URLError as error:  # 503 until then, among others
            if server.poll() is not None or time.monotonic() - start > PATIENCE:
                raise SystemExit(f"not ready after {time.monotonic() - start:.0f} s: {error}") from error
        time.sleep(0.5)


def completion() -> str:
    """What the bundled model goes on with."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{ANSWERS}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def check(most: int) -> list[str]:
    """What is wrong with the image; what was seen is printed."""
    wrong, container = [], buildah("from", IMAGE)
    try:
        took = size(container)
        print(f"size: {took / 1e6:.0f} MB of files, {most} MB allowed")
        if took > most * 10**6:
            wrong.append(f"it has {took / 1e6:.0f} MB, more than {most}")
        who = subprocess.run(
            inside(container, "id", "-u"), check=True, text=True, stdout=subprocess.PIPE
        ).stdout.strip()
        configured = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]["User"]
        print(f"user: {configured}, and {who} inside")
        if configured != USER or who != USER.split(":")[0]:
            wrong.append(f"it runs as {configured}, {who} inside")
        # a chroot has this machine's network: nobody else is to reach it
        command = [*words_of(IMAGE, "Entrypoint"), *words_of(IMAGE, "Cmd"), "--host", "127.0.0.1"]
        print(f"starting: {shlex.join(command)}", flush=True)
        server = subprocess.Popen(inside(container, *command), start_new_session=True)
        try:
            print(f"healthy after {started(container, server):.0f} s, by {shlex.join(health())}")
            print(f"ready {ready(server):.0f} s later; completion: {completion()!r}")
        except (urllib.error.URLError, SystemExit) as error:
            wrong.append(str(error))
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(server.pid, 15)
            server.wait(60)
    finally:
        buildah("rm", container)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="an image to begin with, instead of a stand-in by debootstrap")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument(
        "--wheels", type=Path, default=PLACE / "wheels", help="wheels that pip may take, beside indexes"
    )
    parser.add_argument("--most", type=int, default=1000, help="MB that the image may have")
    parser.add_argument("--built", action="store_true", help=f"only look at {IMAGE}, which was built before")
    args = parser.parse_args()
    lacking = [
        name for name in ("buildah", *([] if args.base or args.built else ["debootstrap"])) if not shutil.which(name)
    ]
    if lacking or os.geteuid() != 0:
        print(f"needs root and {', '.join(lacking or ['nothing else'])}: apt-get install buildah debootstrap")
        return 1
    if not args.built:
        args.wheels.mkdir(parents=True, exist_ok=True)
        build(args.base or stand_in(), args.torch_index, args.wheels)
    wrong = check(args.most)
    print("\n".join(wrong) or "the image does what it says")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
