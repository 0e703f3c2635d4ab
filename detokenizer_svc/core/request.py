"""What the detokenizer knows of a request, from its opening in the log to its result."""

from dataclasses import dataclass, field

from detokenizer_svc.core.logprobs import LogprobLog
from detokenizer_svc.core.textrows import NewRow, SequenceEnd, TextRows, text_rows
from penstock.domain.chain import CHAIN_START
from penstock.domain.finish import Usage
from penstock.domain.params import TextOptions
from penstock.domain.plan import U32
from penstock.domain.request import Header


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
    wants_logprobs: bool = False

    @property
    def request_id(self) -> bytes:
        """16 bytes."""
        return self.header.request_id

    def stop_reason(self, token_id: int) -> int | None:
        """What a token that ended a sequence is called: None for EOS, else the stop token's id."""
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

    def rows(self) -> TextRows:
        """All of it, one row a sequence from its first token to its end."""
        return text_rows(self.new_rows())

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
