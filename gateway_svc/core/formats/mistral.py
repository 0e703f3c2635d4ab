"""Mistral: after one mark a JSON list of objects, or a name and its arguments after each mark."""

from gateway_svc.core.formats.table import Body, NamedCall, ObjectCall, ToolFormat
from gateway_svc.core.formats.written import Written

MISTRAL = ToolFormat(
    "mistral",
    opens=("[TOOL_CALLS]",),
    bodies=(
        Body(ObjectCall(), prefix="[", closes="}", separator=",", end="]"),
        Body(NamedCall("[ARGS]", ignored="[CALL_ID]")),
        Body(NamedCall("")),
    ),
    written=(
        Written("[TOOL_CALLS]", "[ARGS]", "", needs="[ARGS]"),
        Written('{"name": "', '", "arguments": ', "}", between=", ", first="[TOOL_CALLS][", last="]"),
    ),
)
