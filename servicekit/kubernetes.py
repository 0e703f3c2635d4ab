"""The variables that Kubernetes puts into every container's environment for each Service of the namespace.

A Service called `penstock`, or `penstock-…`, makes variables that begin as the settings' do: `PENSTOCK_PORT=tcp://…`,
`PENSTOCK_SERVICE_HOST`, `PENSTOCK_PORT_8000_TCP_ADDR` and so on. They are nobody's settings.
"""

import re
from collections.abc import Mapping

_HOST_AND_PORT = r"(tcp|udp|sctp)://\S+:\d+"
_FORMS = tuple(
    (re.compile(name), re.compile(value))
    for name, value in (
        (r"[A-Z0-9_]+_SERVICE_HOST", r"[0-9a-fA-F.:]+|None"),
        (r"[A-Z0-9_]+_SERVICE_PORT(_[A-Z0-9_]+)?", r"\d+"),
        (r"[A-Z0-9_]+_PORT(_\d+_(TCP|UDP|SCTP))?", _HOST_AND_PORT),
        (r"[A-Z0-9_]+_PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
        (r"[A-Z0-9_]+_PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"[A-Z0-9_]+_PORT_\d+_(TCP|UDP|SCTP)_ADDR", r"[0-9a-fA-F.:]+|None"),
    )
)


def injected(environ: Mapping[str, str], prefix: str) -> list[str]:
    """The variables with this prefix that have the name and the value of one that Kubernetes injects, sorted."""
    return sorted(name for name, value in environ.items() if name.startswith(prefix) and _is_injected(name, value))


def _is_injected(name: str, value: str) -> bool:
    return any(form.fullmatch(name) and values.fullmatch(value) for form, values in _FORMS)


def ignored_line(names: list[str]) -> str:
    """The line that says so."""
    return f"ignored, as Kubernetes sets them for a Service (enableServiceLinks: false ends it): {', '.join(names)}"
