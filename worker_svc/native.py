"""Loads models of our own families: weights in any format, brought into the form in which kernels multiply them."""

import logging
from collections import defaultdict
from dataclasses import replace

import torch

from contract.domain.errors import invalid, unimplemented
from servicekit.checkpoint.model import Checkpoint
from worker_svc.compute import choose_compute
from worker_svc.core.causal_lm import CausalLM, reach_of
from worker_svc.core.config import ModelConfig
from worker_svc.core.distributed import Group
from worker_svc.core.formats.fp8_channel import kernels_have_fp8
from worker_svc.core.formats.int4 import Int4Format
from worker_svc.core.formats.stacked.fp4 import StackedFp4Format
from worker_svc.core.formats.stacked.int4 import StackedInt4Format
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.kv_scales import KVScales
from worker_svc.core.layers.delta_rule import delta_rule_state
from worker_svc.core.layers.placement import Placement
from worker_svc.core.memory import no_states_to_save
from worker_svc.core.models.spec import AttentionSpec
from worker_svc.core.operations.interface import Operations
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.quantization.choice import choose_quantization
from worker_svc.core.quantization.spec import Fp8OnlineSpec
from worker_svc.device import choose_dtype
from worker_svc.kv_scales import read_kv_scales
from worker_svc.loaded_model import LoadedModel, ModelDescription, ModelSource
from worker_svc.model_config import read_model_config
from worker_svc.products import model_products
from worker_svc.runner_options import RunnerOptions
from worker_svc.tuning import card_of, packaged_lines
from worker_svc.weights import fill_randomly, has_own_head, load_weights

# Of the standard library: `LLM` runs in processes that are not ours to configure.
_log = logging.getLogger(__name__)

_AS_COMPUTED = "auto"
# Forms of which a word has eight numbers.
_IN_WORDS = {Int4Format: "int4", StackedInt4Format: "int4", StackedFp4Format: "fp4"}
KV_CACHE_DTYPES = (_AS_COMPUTED, "fp8", "fp8_e4m3")  # the last two are one


class NativeLoader:
    """Implement `Loader` for the families of `core.models`."""

    def __init__(self, options: RunnerOptions, checkpoint: Checkpoint) -> None:
        """Read what the checkpoint says of its model.

        Raises:
            PenstockError: see `load_runner`.
        """
        self._config = _read_config(options, checkpoint)
        _check_kv_cache(options.kv_cache_dtype, self._config)
        if options.num_saved_states and not self._config.decoder.delta_rules:
            raise no_states_to_save(options.num_saved_states)

    def describe(self, options: RunnerOptions, device: torch.device) -> ModelDescription:
        """Implement `Loader.describe`."""
        config, group = self._config, Group(options.rank, options.world_size)
        _refuse_rounding(config, device)
        dtype = choose_dtype(options.dtype, config.dtype, device)
        operations = _operations(device)
        plain = Placement(torch.device("meta"), dtype, group, operations, config.quantization)
        method = config.quantization.method if config.quantization is not None else None
        num_bytes = num_weights_bytes(config, plain)
        return ModelDescription(
            config.is_text_of or config.architecture, "penstock", len(config.decoder.layers), method, num_bytes
        )

    def load(self, source: ModelSource) -> LoadedModel:
        """Implement `Loader.load`."""
        return _load(source, self._config)


def _load(source: ModelSource, config: ModelConfig) -> LoadedModel:
    options, device = source.options, source.device
    _refuse_rounding(config, device)
    dtype = choose_dtype(options.dtype, config.dtype, device)
    plain = Placement(device, dtype, source.group, quantization=config.quantization)
    attention = config.attention
    heads = plain.part(attention.num_heads, "num_attention_heads")
    kv_heads = plain.kv_heads(attention.num_kv_heads)
    num_layers, num_kv_heads = len(config.decoder.attentions), kv_heads.stop - kv_heads.start
    shape = KVCacheShape(
        num_layers,
        num_kv_heads,
        attention.head_dim,
        options.block_size,
        dtype,
        shares_values=attention.shares_values,
        scales=_kv_scales(source, config),
        reaches=tuple(reach_of(each, source.max_model_len) for each in config.decoder.attentions),
    )
    num_heads = heads.stop - heads.start
    compute = choose_compute(
        options.attention,
        options.prefill_attention,
        device,
        shape,
        num_heads,
        products=model_products(config, plain),
        tuning=options.tuning,
        chunk_graphs=options.chunk_graphs,
    )
    placement = replace(plain, operations=compute.operations)
    if source.budget is not None:
        source.budget.check_weights(num_weights_bytes(config, placement))
    model = CausalLM(config.decoder, placement, source.max_model_len)
    _fill(source, config, placement)
    model.prepare()
    if config.is_text_of is not None:
        _log.warning("the text alone is served", extra={"reason": f"{config.is_text_of} has other media, too"})
    weights_bytes = sum(tensor.destination.nbytes for tensor in placement.weights)
    precision = _precision(config, shape)
    state = delta_rule_state(plain, config.decoder.delta_rules)
    return LoadedModel(model, compute, shape, state, num_heads, weights_bytes, dtype, "penstock", precision)


def _check_kv_cache(kept: str, config: ModelConfig) -> None:
    """Refuse what is not there for such a model."""
    if kept not in KV_CACHE_DTYPES:
        raise invalid(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {kept!r}", "kv_cache_dtype")
    if kept == _AS_COMPUTED:
        return
    if config.attention.shares_values:
        raise unimplemented("kv_cache_dtype", f"kv_cache_dtype {kept!r} of latent attention")
    if config.quantization is not None and (other := config.quantization.other_kv_scheme) is not None:
        raise unimplemented(
            "kv_cache_dtype", f"kv_cache_dtype {kept!r} of a checkpoint whose KV cache scheme has {other}"
        )


def _kv_scales(source: ModelSource, config: ModelConfig) -> KVScales | None:
    """Of all layers, the same for all workers of a checkpoint; None: keys and values are kept as they are computed."""
    if source.options.kv_cache_dtype == _AS_COMPUTED:
        return None
    attentions = [each for each in config.decoder.attentions if isinstance(each, AttentionSpec)]
    if source.is_random:
        return KVScales.of_one(len(attentions))
    scales = read_kv_scales(source.directory, attentions, is_text_alone=config.is_text_of is not None)
    extra = {"keys": max(scales.keys), "values": max(scales.values)}
    _log.info("keys and values are kept as 8-bit floats, times scales of at most", extra=extra)
    return scales


def _operations(device: torch.device) -> Operations:
    """Those that would compute there, unless other ones are asked for."""
    if device.type != "cuda":
        return TorchOperations()
    from worker_svc.core.operations.triton_operations import TritonOperations  # noqa: PLC0415  (imports triton)

    return TritonOperations(device, packaged_lines(card_of(device)))


def _is_rounded(config: ModelConfig) -> bool:
    """Return whether weights are rounded to 8-bit floats when they are read (`--quantization fp8`)."""
    return config.quantization is not None and isinstance(config.quantization.format, Fp8OnlineSpec)


def _refuse_rounding(config: ModelConfig, device: torch.device) -> None:
    """Refuse to round weights to what a card does not multiply: they would be widened at once.

    Raises:
        PenstockError: INVALID_ARGUMENT, naming the option.
    """
    if _is_rounded(config) and not kernels_have_fp8(device):
        raise invalid(
            "quantization is fp8, but this card has no 8-bit floats: Ada, Hopper and later have", "quantization"
        )


def num_weights_bytes(config: ModelConfig, placement: Placement) -> int:
    """The bytes that this rank's weights will take: the model is built without memory."""
    meta = replace(placement, device=torch.device("meta"), wanted=[], conversions=[])
    CausalLM(config.decoder, meta, max_model_len=1)
    return sum(tensor.destination.nbytes for tensor in meta.weights)


def _read_config(options: RunnerOptions, checkpoint: Checkpoint) -> ModelConfig:
    config = read_model_config(checkpoint)
    config = replace(config, quantization=choose_quantization(config.quantization, options.quantization))
    decoder, is_text_alone = config.decoder, config.is_text_of is not None
    may_differ = decoder.is_tied and options.load_format != "dummy"
    if may_differ and has_own_head(checkpoint.directory, decoder.embedding, decoder.head, is_text_alone=is_text_alone):
        _log.warning("the head is not tied", extra={"reason": "the checkpoint has another lm_head than embed_tokens"})
        config = replace(config, decoder=replace(decoder, is_tied=False))
    return config


def _fill(source: ModelSource, config: ModelConfig, placement: Placement) -> None:
    if source.is_random:
        fill_randomly(placement.weights)
        return
    num_bytes = load_weights(
        source.directory,
        placement.wanted,
        placement.conversions,
        is_text_alone=config.is_text_of is not None,
        unused=config.decoder.unused_tensors,
        unused_prefixes=config.decoder.unused_prefixes,
        unused_suffixes=config.quantization.unused if config.quantization is not None else (),
    )
    _log.info("weights read", extra={"gigabytes": round(num_bytes / 1e9, 2)})
    _tell_conversions(config, placement)
    if config.quantization is not None and config.quantization.has_kv_scales:
        _tell_unused_kv_scales(source.options, placement)


def _tell_conversions(config: ModelConfig, placement: Placement) -> None:
    """Log the weights that are not kept as they are stored."""
    if config.quantization is None:
        return
    num_bytes: dict[str, int] = defaultdict(int)
    for conversion in placement.conversions:
        made = [each.destination for each in conversion.made.values()]
        dtype = str(made[0].dtype).removeprefix("torch.")  # the numbers come first
        name = _IN_WORDS.get(type(conversion.reading.multiplied), dtype)
        num_bytes[name] += sum(each.nbytes for each in made)
    for name, size in num_bytes.items():
        event = "weights widened" if name == str(placement.dtype).removeprefix("torch.") else "weights converted"
        extra = {"quantization": config.quantization.method, "to": name, "gigabytes": round(size / 1e9, 2)}
        _log.info(event, extra=extra)


def _tell_unused_kv_scales(options: RunnerOptions, placement: Placement) -> None:
    if options.kv_cache_dtype == _AS_COMPUTED:
        dtype = str(placement.dtype).removeprefix("torch.")
        reason = f"keys and values are kept in {dtype}: kv_cache_dtype fp8 keeps them in 8 bits"
        _log.warning("the checkpoint's scales of keys and values are not used", extra={"reason": reason})


def _precision(config: ModelConfig, shape: KVCacheShape) -> str:
    """Of weights, and of the cache where that is another."""
    weights = f"{shape.dtype} fp8" if _is_rounded(config) else str(shape.dtype)
    return weights if shape.scales is None else f"{weights}, KV {shape.kept_dtype}"
