"""The manifests of deploy/ agree with the server, its flags and its images; kubectl renders them where it is."""

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.cli.commands import router, serve
from quintet.config import EngineConfig, read_environment
from quintet.config.schema import flags
from quintet.router.config import PORT as ROUTER_PORT
from quintet.router.config import RouterConfig
from quintet.server.config import ServerConfig
from quintet.server.config_file import read_config_file
from quintet.server.hosts import is_loopback
from quintet.server.http.admin import health as alive
from quintet.server.http.middleware.auth import PUBLIC_PATHS
from quintet.server.metrics import routes as metrics

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE, OVERLAYS = KUBERNETES / "base", sorted((KUBERNETES / "overlays").iterdir())
FLAGS = BASE / "serve.yaml"
DEVICES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu", "xpu": "gpu.intel.com/xe", "tpu": "google.com/tpu"}
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
ROUTES = {route.path for router in (alive.router, metrics.router) for route in router.routes if hasattr(route, "path")}
LABELS = {"app.kubernetes.io/name": "quintet"}

Document = dict[str, Any]


def documents(text: str) -> dict[str, Document]:
    """By kind, of which each manifest has one."""
    found = [each for each in yaml.safe_load_all(text) if each]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def read(path: Path) -> Document:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def named(folder: Path) -> Iterator[Path]:
    """What a kustomization names."""
    told = read(folder / "kustomization.yaml")
    yield from (folder / each for each in told.get("resources", []))
    yield from (folder / each["path"] for each in told.get("patches", []))
    yield from (folder / each for maps in told.get("configMapGenerator", []) for each in maps["files"])


def instruction(platform: str, word: str) -> str:
    """The last one of its kind in an image's file."""
    text = (ROOT / "docker" / f"Dockerfile.{platform}").read_text(encoding="utf-8")
    return re.findall(rf"^{word} (.*)$", text, re.MULTILINE)[-1]


def served(file: Path = FLAGS) -> ServerConfig:
    """The server's settings by a file of flags; its other flags are the engine's."""
    given = read_config_file(str(file)).settings
    fields = ServerConfig.__dataclass_fields__
    EngineConfig(**{name: value for name, value in given.items() if name not in fields})
    return ServerConfig(**{name: value for name, value in given.items() if name in fields})


def parsed(words: list[str]) -> argparse.Namespace:
    """What follows `quintet`; an unknown flag ends the test."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    {"serve": serve, "router": router}[words[0]].add_arguments(parser)
    return parser.parse_args(words[1:])


@pytest.fixture(scope="module", params=["source", *(each.name for each in OVERLAYS)])
def manifest(request: pytest.FixtureRequest) -> dict[str, Document]:
    """The base as it is written, and what kubectl makes of each overlay, by kind."""
    if request.param == "source":
        return documents("\n---\n".join(path.read_text(encoding="utf-8") for path in named(BASE) if path != FLAGS))
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl here: the sources alone are checked")
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / request.param)]
    return documents(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)


@pytest.fixture
def pod(manifest: dict[str, Document]) -> Document:
    return dict(manifest["Deployment"]["spec"]["template"]["spec"])


@pytest.fixture
def container(pod: Document) -> Document:
    (only,) = pod["containers"]
    return dict(only)


# ------------------------------------------------------------------------------------------------ kustomizations


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)
def test_what_is_named_is_there_and_nothing_else(folder: Path) -> None:
    found = {path.resolve() for path in named(folder)}
    assert all(path.exists() for path in found), found
    lying = {path for path in folder.iterdir() if path.name != "kustomization.yaml"}
    assert lying == {path for path in found if path.is_file()}
    for path in folder.glob("*.yaml"):
        assert isinstance(read(path), dict)


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_an_overlay_is_an_image_with_its_device(folder: Path) -> None:
    told = read(folder / "kustomization.yaml")
    if "images" not in told:  # it builds on an overlay that has some
        assert any((folder / each).resolve() in OVERLAYS for each in told["resources"])
        return
    assert told["images"] == [{"name": "quintet", "newTag": folder.name}]
    assert (ROOT / "docker" / f"Dockerfile.{folder.name}").is_file()
    (patch,) = (read(path) for path in named(folder) if path.is_file())
    (box,) = patch["spec"]["template"]["spec"]["containers"]
    wanted = {"memory", DEVICES.get(folder.name, "cpu")}
    assert set(box["resources"]["limits"]) == wanted


def test_every_image_has_an_overlay_and_the_page_says_which_are_unverified() -> None:
    images = {path.suffix[1:] for path in (ROOT / "docker").glob("Dockerfile.*")}
    assert images <= {each.name for each in OVERLAYS}
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (\w+)[^|]*\|$", PAGE, re.MULTILINE))
    assert set(rows) == {each.name for each in OVERLAYS}
    assert all(rows[name] == "unverified" for name in rows if name in DEVICES)


# ----------------------------------------------------------------------------------------------------- the server


def test_arguments_and_flags_are_the_servers(pod: Document, container: Document) -> None:
    arguments = parsed(container["args"])
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (volume,) = (each for each in pod["volumes"] if each["name"] == mounts[str(Path(arguments.config).parent)])
    assert volume["configMap"]["name"].startswith("quintet-flags")
    assert Path(arguments.config).name == FLAGS.name
    assert not is_loopback(served().host)


def test_rendered_flags_are_those_of_the_file(manifest: dict[str, Document], tmp_path: Path) -> None:
    if (rendered := manifest.get("ConfigMap")) is None:  # made by kustomize alone
        assert FLAGS in set(named(BASE))
        return
    (tmp_path / "serve.yaml").write_text(rendered["data"][FLAGS.name])
    assert served(tmp_path / "serve.yaml") == served()
    (volume,) = (v for v in manifest["Deployment"]["spec"]["template"]["spec"]["volumes"] if "configMap" in v)
    assert volume["configMap"]["name"] == rendered["metadata"]["name"]


def test_ports_and_probes_are_the_servers(manifest: dict[str, Document], container: Document) -> None:
    (port,) = container["ports"]
    assert port["containerPort"] == served().port
    (outside,) = manifest["Service"]["spec"]["ports"]
    assert outside["targetPort"] == port["name"]
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {each["port"] for each in paths.values()} == {port["name"]}
    assert {name: each["path"] for name, each in paths.items()} == {
        "startup": "/live", "liveness": "/live", "readiness": "/ready",
    }  # fmt: skip
    assert {each["path"] for each in paths.values()} <= ROUTES & set(PUBLIC_PATHS)  # a probe brings no key
    told = manifest["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert told["prometheus.io/port"] == str(served().port)
    assert told["prometheus.io/path"] in ROUTES


def test_a_pod_has_time_to_drain(pod: Document, container: Document) -> None:
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + served().drain_timeout + 10


def test_no_pod_starts_without_a_key(container: Document) -> None:
    asked = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef", {}) for each in container["env"]}
    assert asked["QUINTET_API_KEY"]["name"] == "quintet-keys"
    assert "optional" not in asked["QUINTET_API_KEY"]
    assert read_environment(dict.fromkeys(asked, "key")).api_key == "key"  # refuses what it does not know


def test_variables_of_services_stay_out(pod: Document) -> None:
    with pytest.raises(ValueError, match="QUINTET_SERVICE_HOST"):
        read_environment({"QUINTET_SERVICE_HOST": "10.0.0.1"})  # of a Service that is called quintet
    assert pod["enableServiceLinks"] is False


# -------------------------------------------------------------------------------------------------------- the pod


def test_pod_and_image_have_one_user_and_one_volume(pod: Document, container: Document) -> None:
    secure = pod["securityContext"]
    for platform in (path.suffix[1:] for path in (ROOT / "docker").glob("Dockerfile.*")):
        assert instruction(platform, "USER") == f"{secure['runAsUser']}:{secure['runAsGroup']}"
        assert instruction(platform, "VOLUME") in {each["mountPath"] for each in container["volumeMounts"]}
    assert (secure["fsGroup"], secure["fsGroupChangePolicy"]) == (secure["runAsGroup"], "OnRootMismatch")


def test_a_pod_may_do_little(pod: Document, container: Document) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/home/quintet/.cache", "/tmp"}


def test_claims_are_there_where_pods_ask_for_them(manifest: dict[str, Document], pod: Document) -> None:
    asked = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each}
    claim = manifest.get("PersistentVolumeClaim")
    assert asked == ({claim["metadata"]["name"]} if claim else set())
    many = "HorizontalPodAutoscaler" in manifest
    assert manifest["Deployment"]["spec"]["strategy"]["type"] == ("RollingUpdate" if many else "Recreate")
    assert bool(asked) is not many, "a claim of one node is no place for several pods"
    assert "replicas" not in manifest["Deployment"]["spec"], "it would undo what a scaler did"


def test_selectors_select_the_pods(manifest: dict[str, Document]) -> None:
    (labels,) = read(BASE / "kustomization.yaml")["labels"]
    assert (labels["pairs"], labels["includeSelectors"], labels["includeTemplates"]) == (LABELS, True, True)
    assert manifest["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": LABELS}
    if "ConfigMap" in manifest:  # rendered: kustomize has filled the others in
        assert manifest["Service"]["spec"]["selector"] == LABELS
        assert manifest["Deployment"]["spec"]["selector"] == {"matchLabels": LABELS}
        assert manifest["Deployment"]["spec"]["template"]["metadata"]["labels"] == LABELS
        image, _, tag = manifest["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"].partition(":")
        assert (image, (ROOT / "docker" / f"Dockerfile.{tag}").is_file()) == ("quintet", True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_the_pages_own_overlay_renders(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n# mine/kustomization.yaml\n(.*?)```", PAGE, re.DOTALL)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(text)
    (mine / FLAGS.name).write_text(FLAGS.read_text().replace("model: bundled", "model: owner/name"))
    command = ["kubectl", "kustomize", str(mine)]
    found = documents(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)
    assert {each["metadata"]["namespace"] for each in found.values()} == {"quintet"}
    assert "model: owner/name" in found["ConfigMap"]["data"][FLAGS.name]
    (box,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert box["image"] == "registry.example.com/quintet:1"


def test_a_scaler_scales_the_deployment() -> None:
    scaler = read(KUBERNETES / "overlays" / "cpu-many" / "scaler.yaml")["spec"]
    assert scaler["scaleTargetRef"]["name"] == read(BASE / "deployment.yaml")["metadata"]["name"]
    assert 1 < scaler["minReplicas"] < scaler["maxReplicas"]


# ------------------------------------------------------------------------------------------------------- compose


@pytest.mark.parametrize("name", ["quintet", "quintet-cuda"])
def test_compose_starts_what_the_images_are(name: str) -> None:
    whole = read(ROOT / "deploy" / "compose.yaml")
    service = whole["services"][name]
    assert service.get("profiles", []) == ([name.removeprefix("quintet-")] if "-" in name else [])
    file = ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
    platform = file.suffix[1:]
    assert (file.is_file(), service["image"]) == (True, f"quintet:{platform}")
    assert not is_loopback(flags.given_settings(parsed(service["command"]), ServerConfig)["host"])
    assert service["environment"]["QUINTET_API_KEY"].startswith("${QUINTET_API_KEY:?")  # refused where it is empty
    assert read_environment(dict.fromkeys(service["environment"], "key")).api_key == "key"
    volume, _, place = service["volumes"][0].partition(":")
    assert (volume in whole["volumes"], place) == (True, instruction(platform, "VOLUME"))
    assert service["ports"] == [f"127.0.0.1:{served().port}:{served().port}"]
    assert int(service["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_timeout
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_a_router_is_started_before_its_servers() -> None:
    whole = read(ROOT / "deploy" / "compose.router.yaml")
    services = whole["services"]
    door = parsed(services["router"]["command"])
    assert not is_loopback(flags.given_settings(door, ServerConfig)["host"])
    backends = flags.from_arguments(door, RouterConfig).backend
    assert set(backends) == {f"http://{name}:{served().port}" for name in services if name != "router"}
    assert services["router"]["ports"] == [f"127.0.0.1:{ROUTER_PORT}:{ROUTER_PORT}"]
    assert f":{ROUTER_PORT}/health" in services["router"]["healthcheck"]["test"][-1] and "/health" in PUBLIC_PATHS
    for name, service in services.items():
        assert (service["image"], service["read_only"], service["cap_drop"]) == ("quintet:cpu", True, ["ALL"])
        assert service["environment"]["QUINTET_API_KEY"].startswith("${QUINTET_API_KEY:?")
        assert int(service["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_timeout
        if name != "router":
            assert not is_loopback(flags.given_settings(parsed(service["command"]), ServerConfig)["host"])
            assert service["volumes"][0].partition(":")[2] == instruction("cpu", "VOLUME")
    assert "compose.router.yaml" in PAGE
