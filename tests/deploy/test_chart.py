"""The Helm chart: Helm's linter, its manifests against Kubernetes' schemas, and the command in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

import cachecraft_rag
from tests.deploy.conftest import ROOT, serve_options

CHART = ROOT / "examples/kubernetes/cachecraft-rag"
LEAST: dict[str, Any] = {"image": {"repository": "registry/server"}, "model": "Qwen/Qwen3-8B"}
EVERYTHING: dict[str, Any] = {
    **yaml.safe_load((CHART.parent / "two-replicas.yaml").read_text()),
    "imagePullSecrets": ["registry"],
    "extraArgs": ["--namespace=team", "--private-system"],
    "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "WARNING"}],
    "extraVolumes": [{"name": "models", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "podLabels": {"team": "search"},
    "podAnnotations": {"note": "any"},
    "runtimeClassName": "nvidia",
    "serviceAccountName": "rag",
    "service": {"annotations": {"note": "any"}},
}
CASES = {"least": LEAST, "everything": EVERYTHING}
Render = Callable[[Mapping[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def helm(module: Callable[[str], Any]) -> Any:
    """Helm's own library."""
    return module("helm_python")


@pytest.fixture
def render(helm: Any) -> Render:
    """`render(values)`: every manifest of a release. A template's error is Helm's own exception."""
    from yamllint import linter
    from yamllint.config import YamlLintConfig

    config = YamlLintConfig(
        "extends: default\nrules: {line-length: disable, document-start: disable, comments: disable, "
        "empty-lines: disable, truthy: disable, indentation: disable, braces: disable}"
    )

    def manifests(values: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = []
        with helm.Chart.load(CHART) as chart:
            files = chart.render(dict(values), name="rag", namespace="prod")
        for name, text in files.items():
            if name.endswith(".yaml"):
                problems = [f"{name}:{one.line}: {one.desc}" for one in linter.run(text, config)]
                assert problems == []
                found += [document for document in yaml.safe_load_all(text) if document]
        return found

    return manifests


def pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (servers,) = (one for one in manifests if one["kind"] == "StatefulSet")
    spec: dict[str, Any] = servers["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("case", sorted(CASES))
def test_helm_lint_has_no_complaint(helm: Any, case: str) -> None:
    report = helm.lint(CHART, CASES[case], strict=True)
    assert report["errors"] == []
    # severity 1 is information: an icon is recommended
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("case", sorted(CASES))
def test_manifests_fit_the_schemas_of_kubernetes(
    render: Render, module: Callable[[str], Any], case: str
) -> None:
    validator = module("kubernetes_validate")
    manifests = render(CASES[case])
    kinds = {one["kind"] for one in manifests}
    assert {"StatefulSet", "Service"} <= kinds
    assert ("ServiceMonitor" in kinds) == ("PodDisruptionBudget" in kinds) == (case != "least")
    for manifest in manifests:
        if manifest["kind"] != "ServiceMonitor":  # of the Prometheus Operator
            for version in ("1.27", validator.latest_version()):
                validator.validate(manifest, version, strict=True)


def test_the_schema_check_bites(render: Render, module: Callable[[str], Any]) -> None:
    validator = module("kubernetes_validate")
    manifests = render(LEAST)
    pod(manifests)["containers"][0]["readinesProbe"] = {}
    (servers,) = (one for one in manifests if one["kind"] == "StatefulSet")
    with pytest.raises(validator.ValidationError):
        validator.validate(servers, "1.27", strict=True)


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_server_starts_as_the_command_allows(render: Render, case: str) -> None:
    (container,) = pod(render(CASES[case]))["containers"]
    given = serve_options(container["args"])
    assert (given["model"], given["port"]) == ("Qwen/Qwen3-8B", 8000)
    assert "--shutdown-timeout=30" in given["arguments"]
    assert {probe["containerPort"] for probe in container["ports"]} == {8000}
    if case == "everything":
        assert (given["session_header"], given["max_model_len"]) == ("X-Session", 8192)
        assert given["namespace"] == "team"
        assert str(given["admin_key_file"]) == "/secrets/admin/keys"
        assert str(given["remote_key_file"]) == "/secrets/remote/keys"
        assert "--max-num-queued-reqs=32" in given["arguments"]


def test_a_server_is_stopped_after_its_requests(render: Render) -> None:
    values = LEAST | {"shutdownTimeoutSeconds": 100, "preStopSeconds": 7, "startupSeconds": 601}
    spec = pod(render(values))
    (container,) = spec["containers"]
    assert "--shutdown-timeout=100" in container["args"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert spec["terminationGracePeriodSeconds"] >= 100 + 7 + 10
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 601


def test_secrets_are_named_and_never_written_out(render: Render) -> None:
    (container,) = pod(render(EVERYTHING))["containers"]
    variables = {one["name"]: one for one in container["env"]}
    for name in ("CACHECRAFT_REMOTE_URL", "VLLM_API_KEY", "HF_TOKEN"):
        assert set(variables[name]["valueFrom"]) == {"secretKeyRef"}
    (container,) = pod(render(LEAST))["containers"]
    assert {one["name"] for one in container["env"]} == {"HOME"}


def test_each_server_has_a_volume_and_runs_without_root(render: Render) -> None:
    manifests = render(EVERYTHING)
    (servers,) = (one for one in manifests if one["kind"] == "StatefulSet")
    (claim,) = servers["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "300Gi"
    spec = pod(manifests)
    assert spec["securityContext"]["runAsUser"] == 10001  # the Dockerfile's
    (container,) = spec["containers"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts["/data"] == claim["metadata"]["name"]
    volumes = {one["name"] for one in spec["volumes"]}
    assert set(mounts.values()) == volumes | {claim["metadata"]["name"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "Set model"),
        ({"image": {"repository": ""}}, "Set image.repository"),
        ({"remote": {"url": "redis://a", "urlSecret": {"name": "b"}}}, "not both"),
        ({"replica": 2}, "replica"),
        ({"settings": {"CACHECRAFT_DISK_BYTES": "1 GB"}}, "CACHECRAFT_DISK_BYTES"),
        ({"maxModelLen": "8k"}, "maxModelLen"),
    ],
)
def test_wrong_values_are_errors_that_name_them(
    helm: Any, change: dict[str, Any], message: str
) -> None:
    values = copy.deepcopy(LEAST) | change

    def install(chart: Any) -> None:
        chart.validate_schema(values)
        chart.render(values, name="rag", namespace="prod")

    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=message):
        install(chart)


def test_the_chart_has_the_package_s_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == cachecraft_rag.__version__
