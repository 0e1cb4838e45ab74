"""The files of deploy/ hold what is true: overrides that load, files and paths that exist, metrics that a server has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import serving
import wire
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families
from serving import Server

from atom.config import Config
from atom.config.load import load_settings
from atom.errors import ConfigError
from atom.serve.http.middleware import PUBLIC_PATHS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
INSTRUCTIONS = """
ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK LABEL ONBUILD RUN SHELL STOPSIGNAL USER VOLUME WORKDIR
"""  # https://docs.docker.com/reference/dockerfile/
OF_DEVICE = re.compile("torch|TORCH|NVIDIA|lock\\..*\\.txt|pip install .* '")  # in what the images may differ
END_SECONDS = 10  # that a supervisor gives a server besides its drain
USER = 10001
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=ROOT / ".venv" / "bin")
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "").splitlines()
    return [(name, value.strip()) for name, _, value in (line.partition(" ") for line in joined if line)]


def extras_of(path: Path) -> list[str]:
    """The extras of atom that a Dockerfile installs."""
    (extras,) = re.findall(r"'\.\[(.+)\]'", path.read_text())
    return str(extras).split(",")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def only(items: list[tuple[str, str]], name: str) -> str:
    (value,) = [value for each, value in items if each == name]
    return value


def unit() -> RawConfigParser:
    parser = RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "atom.service")
    return parser


def container() -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of kubernetes.yaml and its container."""
    (deployment,) = [each for each in documents("kubernetes.yaml") if each["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = documents("compose.yaml")[0]["services"][name]
    return found


def commands() -> Iterator[tuple[str, list[str]]]:
    """The overrides that each file starts the server with."""
    for path in DOCKERFILES:
        yield path.name, json.loads(only(instructions(path), "CMD"))
    yield "compose.yaml", service("atom")["command"]
    yield "kubernetes.yaml", container()[1]["args"]
    program, *overrides = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name in PROJECT["project"]["scripts"]
    yield "atom.service", overrides


COMMANDS = dict(commands())


def config_of(name: str) -> Config:
    return load_settings(COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_of_a_file_starts_the_server(name: str):
    config = config_of(name)
    assert config.job.kind == "serve" and config.serve.http.port == 8000


def test_an_override_that_does_not_exist_would_be_noticed():
    with pytest.raises(ConfigError, match=r"serve\.http\.prot"):
        load_settings([*COMMANDS["atom.service"], "serve.http.prot=8000"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_known_instructions_and_files_and_a_user_who_is_not_root(path: Path):
    found = instructions(path)
    names = [name for name, _ in found]
    assert set(names) <= set(INSTRUCTIONS.split()) and names[0] == "FROM"
    assert only(found, "USER") == f"{USER}:{USER}" and f"--uid {USER}" in path.read_text()
    assert names.index("USER") > max(at for at, name in enumerate(names) if name == "RUN")
    copied = {each for name, value in found if name == "COPY" for each in value.split()[:-1]}
    assert all((ROOT / each).exists() for each in copied)
    packaged = {Path(each).parts[0] for each in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    lock = f"deploy/lock{path.suffix}.txt"
    assert copied == packaged | {"pyproject.toml", lock, "LICENSE", "README.md", "setup.py"}
    assert json.loads(only(found, "ENTRYPOINT")) == list(PROJECT["project"]["scripts"])
    assert only(found, "EXPOSE") == "8000"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_installs_pinned_torch_first_and_extras_that_exist(path: Path):
    installs = [value for name, value in instructions(path) if name == "RUN" and "pip install" in value]
    assert len(installs) == 3 and all("pip install -c lock.txt " in each for each in installs)
    assert "-c lock.txt torch" in installs[0]
    assert set(extras_of(path)) <= set(PROJECT["project"]["optional-dependencies"])
    (program,) = re.findall(r"python -c '(.+?)'", installs[1])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(PROJECT["project"]["dependencies"]) < set(done.stdout.splitlines())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_lock_of_an_image_fits_what_the_project_needs(path: Path):
    heading, *lines = (DEPLOY / f"lock{path.suffix}.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.]+", line) for line in lines), "pins, and no address"
    (version,) = re.findall(r"^python:([\d.]+)-", only(instructions(path), "FROM"))
    assert f"{path.name} installs, with Python {version} on" in heading
    pins = dict(line.split("==") for line in lines)
    assert [*pins] == sorted(pins) and len(pins) == len(lines)
    needed = [*PROJECT["project"]["dependencies"]]
    needed += [each for extra in extras_of(path) for each in PROJECT["project"]["optional-dependencies"][extra]]
    for each in map(Requirement, needed):
        name = each.name.lower().replace("_", "-")
        assert name in pins and each.specifier.contains(pins[name]), f"{each}: renew it with scripts/lock-images"


def test_the_images_have_the_torch_that_was_tested():
    def pin(device: str, name: str) -> str:
        (found,) = re.findall(rf"^{name}==(.+)$", (DEPLOY / f"lock.{device}.txt").read_text(), re.MULTILINE)
        return str(found)

    tested = (ROOT / "constraints.txt").read_text()
    assert [f"torch=={pin(device, 'torch')}\n" for device in ("cpu", "rocm")] == [tested, tested]
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.findall(r"On GPUs, [^.]* with PyTorch ([\d.]+) \(Triton ([\d.]+)\)\.", readme)
    assert said == [tuple(pin("cuda", name).rpartition(".")[0] for name in ("torch", "triton"))]


def test_the_images_differ_only_in_torch_and_extras():
    cpu, cuda, rocm = ([each for each in instructions(path) if not OF_DEVICE.search(each[1])] for path in DOCKERFILES)
    assert [name for name, _ in cpu].count("COPY") == 5
    assert cpu == cuda == rocm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that has answered a request."""
    folder = tmp_path_factory.mktemp("deploy")
    server = serving.start(serving.save_talker(folder / "talker"), folder, stub={"step_seconds": 0.001})
    assert wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0, 9], "max_tokens": 2}).status == 200
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_health_check_of_an_image_passes_while_the_server_serves(path: Path, server: Server):
    check = only(instructions(path), "HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("CMD ") + 4 :])
    assert program == "python" and "http://127.0.0.1:8000/" in arguments[-1]

    def code(url: str) -> int:
        words = [each.replace("http://127.0.0.1:8000", url) for each in arguments]
        return subprocess.run([sys.executable, *words], stderr=subprocess.DEVNULL, check=False).returncode

    assert code(server.url) == 0
    assert code(f"{server.url}/nowhere") == 1
    assert code(f"http://127.0.0.1:{serving.free_port()}") == 1


def test_compose_mounts_what_exists_and_prometheus_asks_the_server():
    (compose,) = documents("compose.yaml")
    build = service("atom")["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and ROOT / build["dockerfile"] in DOCKERFILES
    for each in compose["services"].values():
        assert set(each.get("secrets", [])) <= set(compose["secrets"])
        assert {one["source"] for one in each.get("configs", [])} <= set(compose["configs"])
        for source in (one.split(":")[0] for one in each["volumes"]):
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in compose["volumes"]
    http = config_of("compose.yaml").serve.http
    assert service("atom")["ports"] == [f"127.0.0.1:8000:{http.port}"]
    assert http.api_keys == f"@/run/secrets/{service('atom')['secrets'][0]}"
    assert int(service("atom")["stop_grace_period"].removesuffix("s")) >= http.drain_seconds + END_SECONDS

    prometheus = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    mounted = [one.split(":")[1] for one in service("prometheus")["volumes"]]
    assert prometheus["rule_files"] == [path for path in mounted if path.endswith("alerts.yaml")]
    (scrape,) = prometheus["scrape_configs"]
    assert scrape["job_name"] == "atom" and scrape["static_configs"] == [{"targets": [f"atom:{http.port}"]}]
    assert f"@{scrape['authorization']['credentials_file']}" == http.api_keys
    (provider,) = yaml.safe_load(compose["configs"]["dashboards"]["content"])["providers"]
    assert any(provider["options"]["path"] in one for one in service("grafana")["volumes"])


def test_kubernetes_probes_what_needs_no_key_and_lets_a_drain_end():
    pod, atom = container()
    kinds = {each["kind"]: each for each in documents("kubernetes.yaml")}
    deployment = kinds["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == deployment["selector"]["matchLabels"] == labels
    http = config_of("kubernetes.yaml").serve.http
    assert atom["ports"] == [{"name": "http", "containerPort": http.port}]
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    for kind in ("startup", "readiness", "liveness"):
        probed = atom[f"{kind}Probe"]["httpGet"]
        assert probed["path"] in PUBLIC_PATHS and probed["port"] == "http"
    pause = int(atom["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= pause + http.drain_seconds + END_SECONDS
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == USER
    assert {each["name"] for each in atom["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert any(each["persistentVolumeClaim"]["claimName"] == "atom" for each in pod["volumes"][:1])
    assert kinds["PersistentVolumeClaim"]["metadata"]["name"] == "atom"
    page = (ROOT / "docs/deploy.md").read_text()
    (secret,) = (each["valueFrom"]["secretKeyRef"] for each in atom["env"] if each["name"] == "ATOM_API_KEYS")
    assert f"secret generic {secret['name']} --from-literal={secret['key']}=" in page


def test_the_unit_waits_for_a_drain_and_for_the_servers_word():
    service = unit()["Service"]
    http = config_of("atom.service").serve.http
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) >= http.drain_seconds + END_SECONDS
    page = (ROOT / "docs/deploy.md").read_text()
    assert http.api_keys is not None and f"`{http.api_keys.removeprefix('@')}`" in page
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path):
    text = (DEPLOY / "atom.service").read_text().replace("/opt/atom/bin/atom-run", sys.executable)
    for name, content in (("atom", text), ("wrong", text.replace("RestartSec=2", "RestartSeconds=2"))):
        path = tmp_path / f"{name}.service"
        path.write_text(content)
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ("RestartSeconds" in ended.stderr) == (name == "wrong"), ended.stderr
        assert "atom.service" not in ended.stderr


def alerts() -> list[dict[str, Any]]:
    (file,) = documents("alerts.yaml")
    return [rule for group in file["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return found


EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in alerts()} | {
    f"{panel['title']}, {target['legendFormat']}": target["expr"] for panel in panels() for target in panel["targets"]
}


def selectors(expression: str) -> tuple[dict[str, set[str]], set[str]]:
    """The metrics that an expression asks for, with the labels that it selects them by, and labels of its groups."""
    metrics: dict[str, set[str]] = {}
    groups: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            metrics.setdefault(node.name, set()).update(each.name for each in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            groups.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression.replace("$__rate_interval", "1m")), visit)
    return metrics, groups


def test_the_metrics_of_an_expression_are_found():
    expression = 'histogram_quantile(0.9, sum by (le) (rate(a:b_bucket{x="1"}[$__rate_interval]))) / on (y) c{z=~".+"}'
    assert selectors(expression) == ({"a:b_bucket": {"x"}, "c": {"z"}}, {"le"})
    with pytest.raises(ValueError):
        selectors("rate(a:b[5m]")


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_asks_for_metrics_and_labels_that_there_are(name: str, server: Server):
    text = wire.ask(server.url, "GET", "/metrics").body.decode()
    known = {
        sample.name: set(sample.labels) | SCRAPED
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    } | {"up": SCRAPED}
    metrics, groups = selectors(EXPRESSIONS[name])
    assert metrics
    for metric, labels in metrics.items():
        assert metric in known, f"there is no metric {metric}"
        assert labels | groups <= known[metric], f"{metric} has no such labels"


def test_each_alert_says_what_to_do_and_each_panel_has_a_place():
    for rule in alerts():
        assert rule["annotations"]["description"].endswith(".") and rule["labels"]["severity"] in (
            "critical",
            "warning",
        )
        assert 'job="atom"' in rule["expr"]
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert [panel["id"] for panel in panels()] == list(range(1, len(places) + 1))


FIRING = {  # alert -> series that set it off within half an hour, by minutes
    "AtomServerDown": {'up{job="atom", instance="a"}': "1x5 0x30"},
    "AtomEngineDown": {'atom:engine_up{job="atom", instance="a", engine="0"}': "0x40"},
    "AtomRestarts": {
        'process_start_time_seconds{job="atom", instance="a"}': "1 1 2 3x40",
        'atom:engine_restarts_total{job="atom", instance="a", engine="0"}': "0 0 0 1 2x40",
    },
    "AtomErrors": {
        'atom:http_requests_total{job="atom", instance="a", path="/v1/completions", status="200"}': "0+90x40",
        'atom:http_requests_total{job="atom", instance="a", path="/v1/completions", status="503"}': "0+10x40",
    },
    "AtomRequestsFail": {'atom:request_success_total{job="atom", instance="a", finished_reason="error"}': "0+1x40"},
    "AtomQueueFull": {
        'atom:http_requests_total{job="atom", instance="a", path="/v1/chat/completions", status="429"}': "0+1x40"
    },
    "AtomSlowFirstToken": {
        'atom:time_to_first_token_seconds_bucket{job="atom", instance="a", le="10"}': "0+1x40",
        'atom:time_to_first_token_seconds_bucket{job="atom", instance="a", le="20"}': "0+9x40",
        'atom:time_to_first_token_seconds_bucket{job="atom", instance="a", le="+Inf"}': "0+9x40",
    },
    "AtomPreemptions": {'atom:num_preemptions_total{job="atom", instance="a"}': "0+60x40"},
}
HEALTHY = {
    'up{job="atom", instance="a"}': "1x40",
    'atom:engine_up{job="atom", instance="a", engine="0"}': "1x40",
    'process_start_time_seconds{job="atom", instance="a"}': "1x40",
    'atom:engine_restarts_total{job="atom", instance="a", engine="0"}': "0x40",
    'atom:http_requests_total{job="atom", instance="a", path="/v1/completions", status="200"}': "0+90x40",
    'atom:request_success_total{job="atom", instance="a", finished_reason="stop"}': "0+90x40",
    'atom:time_to_first_token_seconds_bucket{job="atom", instance="a", le="10"}': "0+90x40",
    'atom:time_to_first_token_seconds_bucket{job="atom", instance="a", le="+Inf"}': "0+90x40",
    'atom:num_preemptions_total{job="atom", instance="a"}': "0+1x40",
}


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, which is in the package prometheus")
def test_promtool_sets_off_each_alert_and_none_on_a_healthy_server(tmp_path: Path):
    def case(series: dict[str, str], firing: list[str]) -> dict[str, Any]:
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
        found = 'count by (alertname) (ALERTS{alertstate="firing"})'
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{"expr": found, "eval_time": "30m", "exp_samples": samples}],
        }

    assert FIRING.keys() == {rule["alert"] for rule in alerts()}
    tests = [case(HEALTHY | series, [name]) for name, series in FIRING.items()]
    silent = {name: values for name, values in HEALTHY.items() if not name.startswith("up{")}
    tests += [case(HEALTHY, []), case(silent, ["AtomServerDown"])]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yaml")], "tests": tests}))
    ended = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_file_is_described():
    page = (ROOT / "docs/deploy.md").read_text()
    assert [path.name for path in DEPLOY.iterdir() if f"`{path.name}`" not in page] == []
