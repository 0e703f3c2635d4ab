"""The formats by their names."""

from collections.abc import Mapping
from typing import Final

from gateway_svc.core.formats.deepseek import DEEPSEEK
from gateway_svc.core.formats.glm import GLM
from gateway_svc.core.formats.harmony import HARMONY, HARMONY_THOUGHTS
from gateway_svc.core.formats.hermes import HERMES
from gateway_svc.core.formats.llama3_json import LLAMA3_JSON
from gateway_svc.core.formats.mistral import MISTRAL
from gateway_svc.core.formats.pythonic import PYTHONIC
from gateway_svc.core.formats.table import ReasoningFormat, ToolFormat
from gateway_svc.core.formats.think import THINK

_TOOLS = (HERMES, LLAMA3_JSON, PYTHONIC, MISTRAL, DEEPSEEK, GLM, HARMONY)

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {each.name: each for each in _TOOLS}
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {each.name: each for each in (THINK, HARMONY_THOUGHTS)}
