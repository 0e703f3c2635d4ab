"""GLM 4.5 and 4.6: a name, then keys and values between marks."""

from gateway_svc.core.formats.table import Body, KeyedCall, ToolFormat
from gateway_svc.core.formats.written import Arguments, Written

GLM = ToolFormat(
    "glm",
    opens=("<tool_call>",),
    bodies=(Body(KeyedCall(), end="</tool_call>"),),
    written=(Written("<tool_call>", "", "</tool_call>", between="\n", arguments=Arguments.KEYED),),
)
