"""The decoders of the transformers that is installed, and whether they prove themselves."""

from collections.abc import Iterator, Mapping

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers import __version__ as version

from worker_svc.core.transformers_models.attention import register
from worker_svc.core.transformers_models.proof import prove
from worker_svc.core.transformers_models.refusal import NotDoneError, said

_MAX_MODEL_LEN = 2048  # where a configuration does not say it
_FIELDS = ("max_position_embeddings", "n_positions")


def survey(kinds: Mapping[str, type[PreTrainedConfig]] | None = None) -> Iterator[tuple[str, str]]:
    """Each decoder by the name of its class, and what came of its proof with the default configuration.

    kinds: configurations by model type; None: all.
    """
    register()
    for kind in kinds if kinds is not None else CONFIG_MAPPING:
        made = CONFIG_MAPPING[kind]
        if made in MODEL_FOR_CAUSAL_LM_MAPPING:
            yield getattr(MODEL_FOR_CAUSAL_LM_MAPPING[made], "__name__", kind), _verdict(made)


def _verdict(made: type[PreTrainedConfig]) -> str:
    try:
        config = made()
        lengths = (getattr(config.get_text_config(), name, None) for name in _FIELDS)
        proof = prove(config, next((each for each in lengths if isinstance(each, int)), _MAX_MODEL_LEN))
    except NotDoneError as error:
        return f"refused: it {error}"
    # Some have no default configuration, or need packages that are not here.
    except Exception as error:  # noqa: BLE001
        return f"refused: it has no default configuration here ({said(error)})"
    return f"proved with transformers {version}: off by at most {proof.error:.1g} in {proof.num_rows} tokens"
