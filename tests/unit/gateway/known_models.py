"""Models by which bodies are read."""

from told_chats import FACTS

from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.pooling import PoolingFacts
from gateway_svc.core.formats.choice import NO_FORMATS, ModelFormats, choose_formats


class Known:
    """All models are the same."""

    def __init__(self, formats: ModelFormats = NO_FORMATS) -> None:
        self._formats = formats

    def defaults(self, name: str) -> GenerationDefaults:
        del name
        return OPENAI_DEFAULTS

    def pooling(self, name: str) -> PoolingFacts:
        del name
        return PoolingFacts(size=64)

    def formats(self, name: str) -> ModelFormats:
        del name
        return self._formats


CALLING = Known(choose_formats(FACTS, "auto", "auto"))  # it calls functions, and thinks
