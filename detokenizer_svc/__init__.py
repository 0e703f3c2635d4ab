"""The detokenizer service: token rows become text, and every request's end is decided here."""
