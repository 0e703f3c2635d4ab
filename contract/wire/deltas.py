"""Deltas: a step as gRPC clients are told of it."""

from contract.domain.finish import Usage
from contract.domain.rows import TextRow, TokenLogprob
from contract.v1 import common_pb2, inference_pb2
from contract.wire.requests import pack_u32


def encode_delta(row: TextRow, index: int) -> inference_pb2.Delta:
    """A row of the sample that its client knows by this index."""
    message = inference_pb2.Delta(
        sequence=index,
        token_offset=row.token_offset,
        text_offset=row.text_offset,
        token_ids=pack_u32(row.token_ids),
        text=row.text,
        logprobs=map(_token_logprob, row.logprobs),
        finish_reason=common_pb2.FinishReason.ValueType(row.finish),
        usage=None if row.usage is None else encode_usage(row.usage),
    )
    if row.model_digest and (row.finish or not row.token_offset):
        message.system_fingerprint = row.model_digest.hex()
    if isinstance(row.stop_reason, str):
        message.stop_string = row.stop_reason
    elif row.stop_reason is not None:
        message.stop_token_id = row.stop_reason
    return message


def encode_usage(usage: Usage) -> common_pb2.Usage:
    """Tokens that a request used."""
    return common_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        output_tokens=usage.num_output_tokens,
        cached_tokens=usage.num_cached_tokens,
    )


def _token_logprob(entry: TokenLogprob) -> inference_pb2.TokenLogprob:
    top_bytes = entry.top_bytes or (b"",) * len(entry.top)
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        text=entry.token_bytes.decode(errors="replace"),
        utf8=entry.token_bytes,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[
            inference_pb2.TokenLogprob(
                token_id=token_id,
                text=token_bytes.decode(errors="replace"),
                utf8=token_bytes,
                logprob=logprob,
                rank=rank,
            )
            for rank, ((token_id, logprob), token_bytes) in enumerate(zip(entry.top, top_bytes, strict=True), 1)
        ],
    )
