"""The objects for an operator's Prometheus and Grafana."""

import json

import yaml
from kube import CHART, HUB, example, of_kind, pods, render, settings
from rendered import SERVICES


def test_metrics_are_scraped_as_they_are_served() -> None:
    objects = render(*example("several-tenants"))
    monitors = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PodMonitor")}
    for pod in pods(objects):
        if pod.component in SERVICES:
            (endpoint,) = monitors[pod.name]["podMetricsEndpoints"]
            assert endpoint["port"] in {each["name"] for each in pod.container["ports"]}
            assert endpoint["scheme"] == "https"
            assert endpoint["authorization"]["credentials"]["name"] == "penstock-metrics-token"
            assert monitors[pod.name]["selector"]["matchLabels"].items() <= pod.labels.items()


def test_a_service_monitor_scrapes_the_same_pods_in_the_same_way() -> None:
    chosen = {"enabled": True, "interval": "7s", "relabelings": [{"action": "drop", "regex": "x"}]}
    chosen |= {"labels": {"team": "serving"}, "metricRelabelings": [{"action": "keep", "regex": "penstock_.*"}]}
    by_pod, by_service = (
        render(*example("several-tenants"), *settings(defaults__podMonitor=pod, defaults__serviceMonitor=service))
        for pod, service in ((chosen, {"enabled": False}), ({"enabled": False}, chosen))
    )
    assert not of_kind(by_pod, "ServiceMonitor")
    assert not of_kind(by_service, "PodMonitor")
    pod_monitors = {each["metadata"]["name"]: each for each in of_kind(by_pod, "PodMonitor")}
    services = of_kind(by_service, "Service")
    scraped = {}
    for monitor in of_kind(by_service, "ServiceMonitor"):
        other = pod_monitors.pop(monitor["metadata"]["name"])
        assert monitor["metadata"] == other["metadata"]
        assert monitor["spec"]["endpoints"] == other["spec"]["podMetricsEndpoints"]
        assert monitor["spec"]["podTargetLabels"] == other["spec"]["podTargetLabels"]
        selected = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (each for each in services if selected <= each["metadata"]["labels"].items())
        (port,) = service["spec"]["ports"]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert port["name"] == endpoint["port"]
        scraped[monitor["metadata"]["name"]] = [
            pod.name for pod in pods(by_service) if service["spec"]["selector"].items() <= pod.labels.items()
        ]
    assert not pod_monitors
    assert scraped == {pod.name: [pod.name] for pod in pods(by_service) if pod.component in SERVICES}


def test_the_rules_are_those_that_promtool_has_checked() -> None:
    rules = yaml.safe_load((CHART / "files" / "prometheus-rules.yaml").read_text())
    (rule,) = of_kind(render(*example("eight-gpus")), "PrometheusRule")
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    elsewhere = settings(prometheusRule__enabled=True, prometheusRule__runbookUrl="https://example.com/runbooks/")
    (rule,) = of_kind(render(*HUB, *elsewhere), "PrometheusRule")
    urls = [
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if "alert" in each
    ]
    assert urls
    assert all(url.startswith("https://example.com/runbooks/Penstock") for url in urls)


def test_boards_are_config_maps_that_a_sidecar_finds() -> None:
    files = {path.name: path.read_text() for path in (CHART / "files" / "boards").iterdir()}
    assert not any("board" in each["metadata"]["name"] for each in of_kind(render(*HUB), "ConfigMap"))
    elsewhere = settings(
        dashboards={"enabled": True, "labels": {"boards": "yes"}, "annotations": {"folder": "LLM"}},
        prometheusRule__runbookUrl="https://example.com/runbooks/",
    )
    for arguments, label, annotation, runbooks in (
        (settings(dashboards__enabled=True), "grafana_dashboard", "grafana_folder", "docs/runbooks"),
        (elsewhere, "boards", "folder", "https://example.com/runbooks"),
    ):
        maps = [each for each in of_kind(render(*HUB, *arguments), "ConfigMap") if "board" in each["metadata"]["name"]]
        assert len(maps) == len(files)
        for each in maps:
            assert label in each["metadata"]["labels"]
            assert annotation in each["metadata"]["annotations"]
            ((name, text),) = each["data"].items()
            expected = files[name.removeprefix("penstock-")].replace('"docs/runbooks"', f'"{runbooks}"')
            assert json.loads(text) == json.loads(expected)
            assert f'"{runbooks}"' in text
