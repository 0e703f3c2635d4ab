"""Llama 3.1 to 3.3: the whole output is JSON objects, perhaps after a mark."""

from gateway_svc.core.formats.table import Body, ObjectCall, ToolFormat
from gateway_svc.core.formats.written import Written

LLAMA3_JSON = ToolFormat(
    "llama3_json",
    opens=("<|python_tag|>",),
    bodies=(Body(ObjectCall(("parameters", "arguments")), closes="}", separator=";"),),
    is_bare=True,
    written=(Written('{"name": "', '", "parameters": ', "}", between="; "),),
)
