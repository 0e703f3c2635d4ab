"""A request as the detokenizer knows it, from its opening in the log to its result."""

from dataclasses import dataclass, field

from contract.domain.chain import CHAIN_START
from contract.domain.finish import Usage
from contract.domain.params import TextOptions
from contract.domain.plan import U32
from contract.domain.request import Header
from contract.domain.timeline import Timeline
from detokenizer_svc.core.logprobs import LogprobLog
from detokenizer_svc.core.spans import Asked, Trace
from detokenizer_svc.core.textrows import NewRow, SequenceEnd, TextRows, text_rows


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request as its log opens it."""

    header: Header
    n: int
    num_prompt_tokens: int  # 0 if it was rejected before it had tokens
    text: TextOptions = field(default_factory=TextOptions)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # empty if the request ignores them
    wants_logprobs: bool = False  # or is told them of beams, whose outputs come with them
    has_search: bool = False  # its outputs are found by a beam search
    asked: Asked = field(default_factory=Asked)
    tokenizing_ns: int = 0  # Unix time, see `Timeline`
    tokenized_ns: int = 0
    opened_ns: int = 0

    @property
    def request_id(self) -> bytes:
        """16 bytes."""
        return self.header.request_id

    def begun_timeline(self) -> Timeline:
        """The moments up to its opening."""
        return Timeline(self.tokenizing_ns, self.tokenized_ns, self.opened_ns)

    def stop_reason(self, token_id: int) -> int | None:
        """The name of a token that ended a sequence: None for EOS, else the stop token's id."""
        return None if token_id in self.eos_token_ids or token_id not in self.stop_token_ids else token_id


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """One sample's result."""

    text: str
    token_ids: U32  # u32[num_output_tokens]
    logprobs: LogprobLog | None  # of the tokens, if asked for
    end: SequenceEnd


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request's result."""

    header: Header
    sequences: tuple[FinishedSequence, ...]
    usage: Usage
    model_digest: bytes = b""  # of the model that computed it; empty: it has no tokens
    timeline: Timeline = field(default_factory=Timeline)

    def trace(self, asked: Asked) -> Trace:
        """Its trace; `asked` is what was asked for."""
        reasons = tuple(sequence.end.reason for sequence in self.sequences)
        error = next((sequence.end.error for sequence in self.sequences if sequence.end.error), None)
        return Trace(self.header, asked, self.usage, self.timeline, reasons, error)

    def rows(self) -> TextRows:
        """All of it, one row a sequence from its first token to its end."""
        return text_rows(self.new_rows(), self.model_digest)

    def new_rows(self) -> list[NewRow]:
        """The same, before they are columns."""
        return [
            NewRow(
                request_id=self.header.request_id,
                sequence=index,
                token_offset=0,
                text_offset=0,
                chain=CHAIN_START,
                token_ids=sequence.token_ids.tolist(),
                text=sequence.text,
                end=sequence.end,
                logprobs=sequence.logprobs,
                num_prompt_tokens=self.usage.num_prompt_tokens,
            )
            for index, sequence in enumerate(self.sequences)
        ]
