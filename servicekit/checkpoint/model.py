"""The JSON files that say what a model is, and what they decide of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.domain.errors import broken, invalid

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)  # as families call them
# By model type of a `text_config`: what published ones leave out, as transformers' class has it by default.
_LEFT_OUT = {
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
    },
}
_STRETCHING_ROPES = ("linear", "dynamic", "yarn")  # their factor lengthens max_position_embeddings


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an absent file is an empty one.

    Raises:
        PenstockError: INTERNAL (operator): unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise broken(f"{path} cannot be read as JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise broken(f"{path} must hold a JSON object; fetch the checkpoint again")
    return value


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's directory, and what it says of its model."""

    directory: Path
    config: dict[str, Any]  # of config.json as it is; empty: there is none
    generation_config: dict[str, Any]  # of the model's own generation_config.json; empty: there is none

    def text_field(self, name: str) -> Any:
        """A field of config.json; of a model of several media that of its `text_config`. None if there is none."""
        nested = self.config.get("text_config")
        own = self.config.get(name)
        return nested.get(name, own) if isinstance(nested, Mapping) else own

    @property
    def num_positions(self) -> Any:
        """The positions of the model, as config.json says them; None: it does not."""
        return next((value for name in _POSITIONS if (value := self.text_field(name)) is not None), None)

    def context_length(self, max_model_len: int | None = None) -> int:
        """Tokens of a sequence, prompt and output together.

        max_model_len: what is wanted; None: as many as the model has positions. A rope that is scaled may allow more
        than these.

        Raises:
            PenstockError: INVALID_ARGUMENT naming `max_model_len`, which the model does not reach; INTERNAL (operator):
                nothing says it.
        """
        stated = self.num_positions
        if type(stated) is not int or stated < 1:
            if max_model_len is not None:
                return max_model_len
            if not self.config:
                raise broken(
                    f"{self.directory} has no {CONFIG}, which says how long the model's context is: give the directory "
                    "that holds it, fetch the checkpoint again, or set max_model_len"
                )
            raise broken(f"{self.directory / CONFIG} does not say max_position_embeddings; set max_model_len")
        if max_model_len is None:
            return stated
        if max_model_len > (limit := int(stated * self._stretch)):
            raise invalid(
                f"max_model_len {max_model_len} exceeds the {limit} positions of the model in {self.directory}",
                "max_model_len",
            )
        return max_model_len

    @property
    def _stretch(self) -> float:
        """The factor by which a rope that is scaled lengthens the positions."""
        rope = self.text_field("rope_scaling") or self.text_field("rope_parameters")
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in _STRETCHING_ROPES:
            return 1.0
        return float(rope.get("factor", 1.0))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read what a checkpoint says of its model.

    Raises:
        PenstockError: INTERNAL (operator): a file is broken.
    """
    return Checkpoint(directory, _completed(read_json(directory / CONFIG)), read_json(directory / GENERATION_CONFIG))


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """With what its `text_config` leaves out."""
    text = config.get("text_config")
    if not isinstance(text, dict) or not isinstance(model_type := text.get("model_type"), str):
        return config
    return {**config, "text_config": {**_LEFT_OUT.get(model_type, {}), **text}}
