"""The vectors of a call's prompts, as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import Usage
from contract.domain.pooling import F32
from contract.domain.rows import TextRow
from gateway_svc.core.prompt_outputs import PromptOutput, PromptVector


@dataclass(slots=True)
class PooledOutcome:
    """The outcome of a call for vectors; whole once all of its requests have ended."""

    num_prompts: int
    _vectors: dict[int, F32] = field(default_factory=dict)  # by prompt
    _usages: dict[int, Usage] = field(default_factory=dict)
    _models: set[bytes] = field(default_factory=set)

    def learn(self, prompt: int, output: PromptOutput) -> None:
        """Take what was computed of a prompt."""
        if isinstance(output, PromptVector):
            self._vectors[prompt] = output.values

    def add(self, prompt: int, row: TextRow) -> None:
        """Take the row that ends a prompt's request."""
        self._usages[prompt] = row.usage or Usage()
        self._models.add(row.model_digest)

    @property
    def vectors(self) -> Sequence[F32]:
        """The vectors f32[dimensions], by prompt.

        Raises:
            PenstockError: INTERNAL: one is missing.
        """
        if len(self._vectors) < self.num_prompts:
            raise PenstockError(ErrorCode.INTERNAL, "the request ended without its vector")
        return [self._vectors[prompt] for prompt in range(self.num_prompts)]

    @property
    def usage(self) -> Usage:
        """The tokens that all requests used."""
        several = self._usages.values()
        return Usage(
            num_prompt_tokens=sum(each.num_prompt_tokens for each in several),
            num_output_tokens=sum(each.num_output_tokens for each in several),
            num_cached_tokens=sum(each.num_cached_tokens for each in several),
        )

    @property
    def fingerprint(self) -> str:
        """The digest of the model that answers, in hexadecimal digits; empty: there are two, or it is not known."""
        return next(iter(self._models)).hex() if len(self._models) == 1 else ""
