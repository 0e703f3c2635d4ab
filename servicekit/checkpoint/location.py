"""The place of a checkpoint: a local directory, or a repository on the Hugging Face hub."""

from pathlib import Path

from contract.domain.errors import broken

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "1_Pooling/config.json",
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def find_checkpoint(model: str, revision: str | None = None, *, with_weights: bool = False) -> Path:
    """The local directory of `model`, which is a directory or a hub id; a hub id is downloaded into the hub's cache.

    Args:
        model: the directory or the hub id.
        revision: branch, tag or commit of a hub id.
        with_weights: whether more is fetched of a hub id than the files of text and configuration.

    Raises:
        PenstockError: INTERNAL (operator): neither a directory nor a model that the hub gives us.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise broken(f"{model} is not a directory; give the path of a checkpoint or a hub id")
    # A path that is not there must not be asked of the hub: its answer would hide the typing mistake.
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise broken(f"the model directory {model} does not exist; give the path of a checkpoint or a hub id")
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only a hub id needs it, and it is slow to import

    wanted = [*_TEXT_FILES, *(_WEIGHTS if with_weights else ())]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except Exception as error:  # of the network, the disk, the name, the access token
        raise broken(
            f"{model} is not a directory here, and the hub did not give it to us ({type(error).__name__}: "
            f"{str(error)[:300]}); check the name, the network and the access token, or give a local directory"
        ) from error
