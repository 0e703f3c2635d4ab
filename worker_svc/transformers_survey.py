"""The decoders and encoders of the transformers that is installed, and whether they prove themselves."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
)
from transformers import __version__ as version

from worker_svc.core.transformers_models.attention import register
from worker_svc.core.transformers_models.encoder_proof import prove_encoder
from worker_svc.core.transformers_models.proof import prove
from worker_svc.core.transformers_models.refusal import NotDoneError, said

_MAX_MODEL_LEN = 2048  # where a configuration does not say it
_FIELDS = ("max_position_embeddings", "n_positions")


def survey(kinds: Mapping[str, type[PreTrainedConfig]] | None = None) -> Iterator[tuple[str, str]]:
    """Each decoder, and each encoder of masked tokens, by the name of its class, and what came of its proof with the
    default configuration.

    kinds: configurations by model type; None: all.
    """
    register()
    for kind in kinds if kinds is not None else CONFIG_MAPPING:
        made = CONFIG_MAPPING[kind]
        if made in MODEL_FOR_CAUSAL_LM_MAPPING:
            yield _name(MODEL_FOR_CAUSAL_LM_MAPPING[made], kind), _verdict(made, _of_decoder)
        if made in MODEL_FOR_MASKED_LM_MAPPING and made in MODEL_MAPPING:
            yield _name(MODEL_MAPPING[made], kind), _verdict(made, _of_encoder)


def _name(found: Any, kind: str) -> str:
    return getattr(found[0] if isinstance(found, tuple) else found, "__name__", kind)


def _of_decoder(config: PreTrainedConfig, max_model_len: int) -> tuple[float, int]:
    proof = prove(config, max_model_len)
    return proof.error, proof.num_rows


def _of_encoder(config: PreTrainedConfig, max_model_len: int) -> tuple[float, int]:
    proof = prove_encoder(config, max_model_len, torch.device("cpu"), torch.float32)
    return proof.error, proof.num_tokens


def _verdict(made: type[PreTrainedConfig], proved: Callable[[PreTrainedConfig, int], tuple[float, int]]) -> str:
    try:
        config = made()
        lengths = (getattr(config.get_text_config(), name, None) for name in _FIELDS)
        worst, num_tokens = proved(config, next((each for each in lengths if isinstance(each, int)), _MAX_MODEL_LEN))
    except NotDoneError as error:
        return f"refused: it {error}"
    # Some have no default configuration, or need packages that are not here.
    except Exception as error:  # noqa: BLE001
        return f"refused: it has no default configuration here ({said(error)})"
    return f"proved with transformers {version}: off by at most {worst:.1g} in {num_tokens} tokens"
