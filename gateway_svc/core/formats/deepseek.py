"""DeepSeek V3, R1 and V3.1: marks around each call and around all of them."""

from gateway_svc.core.formats.table import Body, NamedCall, ToolFormat
from gateway_svc.core.formats.written import Written

_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"
_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FENCE = "```"

DEEPSEEK = ToolFormat(
    "deepseek",
    opens=(_BEGIN,),
    bodies=(
        Body(NamedCall(f"\n{_FENCE}json\n", before=f"function{_SEPARATOR}"), closes=_FENCE, end=_END),
        Body(NamedCall(_SEPARATOR), end=_END),
    ),
    silent=_ALL,
    written=(
        Written(
            f"{_BEGIN}function{_SEPARATOR}",
            f"\n{_FENCE}json\n",
            f"\n{_FENCE}{_END}",
            between="\n",
            first=_ALL[0],
            last=_ALL[1],
        ),
        Written(_BEGIN, _SEPARATOR, _END, first=_ALL[0], last=_ALL[1]),
    ),
)
