"""The reason why a module of transformers' cannot be served."""


class NotDoneError(Exception):
    """Something of a model that is not done; its text goes on after the model's name."""


def said(error: Exception) -> str:
    """The message of an error, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
