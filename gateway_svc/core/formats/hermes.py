"""Hermes, Qwen 2.5 and Qwen 3: a JSON object between marks for each call."""

from gateway_svc.core.formats.table import Body, ObjectCall, ToolFormat
from gateway_svc.core.formats.written import Written

HERMES = ToolFormat(
    "hermes",
    opens=("<tool_call>",),
    bodies=(Body(ObjectCall(), closes="}", end="</tool_call>"),),
    written=(Written('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),),
)
