"""The model's tokenizer, the only file of a checkpoint that text needs."""

from pathlib import Path

from tokenizers import Tokenizer

from contract.domain.errors import ErrorCode, PenstockError


def load_tokenizer(model: str, revision: str | None = None) -> Tokenizer:
    """Reads `tokenizer.json` of a local directory or hub id.

    Raises:
        PenstockError: INTERNAL (operator): it is not there or is no tokenizer.
    """
    directory = Path(model).expanduser()
    file = directory / "tokenizer.json"
    is_hub_id = not directory.is_dir() and not directory.is_absolute() and not model.startswith((".", "~"))
    if not is_hub_id and not file.is_file():
        raise PenstockError(
            ErrorCode.INTERNAL,
            f"{file} does not exist; give a checkpoint with tokenizer.json, the only format that Penstock reads",
        )
    try:
        tokenizer: Tokenizer = (
            Tokenizer.from_pretrained(model, revision or "main") if is_hub_id else Tokenizer.from_file(str(file))
        )
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot read
        raise PenstockError(
            ErrorCode.INTERNAL, f"the tokenizer of {model} cannot be read ({str(error)[:300]}); fetch it again"
        ) from error
    return tokenizer
