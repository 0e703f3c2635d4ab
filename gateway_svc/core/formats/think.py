"""Qwen 3, DeepSeek R1, GLM 4.5 and many more: what the model thinks stands between two marks.

Where the chat template has written the first one already, the output begins inside.
"""

from contract.domain.chat_facts import THOUGHT_MARKS
from gateway_svc.core.formats.table import ReasoningFormat

THINK = ReasoningFormat("think", *THOUGHT_MARKS)
