"""What an attention backend offers."""

from typing import Protocol

from torch import Tensor

from worker_svc.core.batch import Batch


class StepAttention(Protocol):
    """Attention of one step's batch; handed to the model as an argument."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the tokens' keys and values to the cache of `layer`, then attend causally over each context.

        query [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim] -> like query.
        """


class AttentionBackend(Protocol):
    """Made once for a KV cache; what a step needs is prepared once, not once a layer."""

    def prepare(self, batch: Batch, slot_mapping: Tensor, block_tables: Tensor) -> StepAttention:
        """The attention of `batch`; never waits for the device.

        slot_mapping i64[tokens] and block_tables i64[max_num_seqs, max_blocks] (by slot) are on the device.
        """
