"""Llama 3.2 and Llama 4: the whole output is a list of calls in Python, perhaps between marks."""

from gateway_svc.core.formats.table import Body, PythonCall, ToolFormat
from gateway_svc.core.formats.written import Arguments, Written

PYTHONIC = ToolFormat(
    "pythonic",
    opens=("<|python_start|>",),
    bodies=(Body(PythonCall(), prefix="[", separator=",", end="]"),),
    is_bare=True,
    silent=("<|python_end|>",),
    written=(Written("", "(", ")", between=", ", first="[", last="]", arguments=Arguments.PYTHON),),
)
